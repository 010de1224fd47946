"""Making the server's tables, and refusing a database whose tables are of another version."""

from __future__ import annotations

import uuid
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from notify.errors import InvalidRequest, StorageFailed
from notify.storage.sql.tables import server_half_message, server_shard

VERSION_TABLE = "server_schema_version"


def upgrade(engine: Engine, shard: str) -> None:
    """Bring the tables to this version, and name the database as a shard if it has no name yet.

    Safe to run from several servers at once. Raises StorageFailed for a shard of another name.
    """
    with engine.connect() as connection:
        with _alone(connection):
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
            if connection.execute(sa.select(server_shard.c.name)).first() is None:
                connection.execute(server_shard.insert().values(id=1, name=shard, source=str(uuid.uuid4())))
            connection.commit()
    check(engine, shard)


def check(engine: Engine, shard: str) -> None:
    """Raises StorageFailed where the tables are missing, of an older or newer version, or of another shard."""
    check_version(engine)
    with engine.connect() as connection:
        name = connection.execute(sa.select(server_shard.c.name)).scalar_one_or_none()
        if name != shard:
            raise StorageFailed(
                f"this database is shard {name!r}, and the server was told that it is {shard!r}: the DSN is of another "
                f"shard, or --storage should say {name}=…"
            )


def check_version(engine: Engine) -> None:
    """Raises StorageFailed where the tables are missing, or of an older or newer version."""
    with engine.connect() as connection:
        found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
        newest = newest_revision()
        if found is None:
            raise StorageFailed(
                "the database has no tables of Notify's server: make them with `notify storage upgrade --storage …`"
            )
        if found != newest:
            known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
            if found in known:
                raise StorageFailed(
                    f"the database's tables are of version {found}, this server needs {newest}: "
                    "run `notify storage upgrade --storage …`"
                )
            raise StorageFailed(
                f"the database's tables are of version {found}, which this server does not know (it knows {newest}): "
                "a newer server made them; upgrade this one"
            )
        missing = {c.name for c in server_half_message.columns} - {
            str(c["name"]) for c in sa.inspect(connection).get_columns(server_half_message.name)
        }
        if missing:
            raise StorageFailed(
                f"table {server_half_message.name} lacks {', '.join(sorted(missing))}: it is not one that "
                "`notify storage upgrade` made; rename it, or use another database"
            )


def newest_revision() -> str:
    """The version of the tables that this code needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


class _alone:
    """While one upgrades, others wait: an advisory lock where there is one (SQLite's own lock serves)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name = connection.dialect.name

    def __enter__(self) -> None:
        if self._name == "postgresql":
            self._connection.exec_driver_sql("SELECT pg_advisory_lock(7400)")
        elif self._name in ("mysql", "mariadb"):
            got = self._connection.exec_driver_sql("SELECT GET_LOCK('notify-schema', 30)").scalar()
            if got != 1:
                raise InvalidRequest("another process is changing the tables; try again when it is done")

    def __exit__(self, *exc: object) -> None:
        self._connection.rollback()
        if self._name == "postgresql":
            self._connection.exec_driver_sql("SELECT pg_advisory_unlock(7400)")
        elif self._name in ("mysql", "mariadb"):
            self._connection.exec_driver_sql("SELECT RELEASE_LOCK('notify-schema')")
        self._connection.commit()
