"""Makes the server's tables, and refuses a database whose tables this version cannot use.

A migration only adds tables, and columns that are nullable or have a default. So an older server
can use newer tables. Data that an older server must not touch gets a table of another name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection, Engine

from notify.errors import InvalidRequest, StorageFailed
from notify.runtime import guarantees
from notify.runtime.databases import INNODB, has_table
from notify.runtime.guarantees import DELETE, INSERT, SELECT, UPDATE, Need
from notify.storage.sql import administration
from notify.storage.sql.checkup import is_on, variables
from notify.storage.sql.tables import metadata, server_half_message, server_shard

log = structlog.get_logger("notify.sql")

VERSION_TABLE = "server_schema_version"
_VERSION = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True), **INNODB)
"""Alembic's table. Alembic itself would make it with the database's default engine, which may lack transactions."""
NEEDS = tuple(
    Need(table, "two servers could both write what only one of them may", (SELECT, INSERT, UPDATE, DELETE))
    for table in (
        _VERSION,
        *metadata.sorted_tables,
        *administration.metadata.sorted_tables,
    )
)
"""The server's needs of its tables: see notify/runtime/guarantees.py."""


def upgrade(engine: Engine, shard: str, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Bring the tables to this version, and name the database as a shard if it has no name yet.

    Several servers may run it at the same time. Raises StorageFailed for a shard of another name, or a database that
    logs statements, UnsafeTable, and InvalidRequest if another process keeps the tables locked.
    """
    deadline = clock() + WAIT_SECONDS
    while True:
        try:
            return _upgrade(engine, shard)
        except sa.exc.OperationalError as error:
            # On SQLite every writer waits for all others, on a slow disk for longer than an engine's own bound.
            if getattr(error.orig, "sqlite_errorname", None) != "SQLITE_BUSY":
                raise
            if clock() >= deadline:
                raise InvalidRequest(_BUSY) from None


def _upgrade(engine: Engine, shard: str) -> None:
    verify(engine)  # otherwise a version that this role may not see would seem to be missing
    _check_binlog(engine)
    with engine.connect() as connection:
        with _alone(connection):
            current = _revision_of(connection)
            if current is None or _is_known(current):  # otherwise they are a newer server's, which `check` judges
                config = _config()
                config.attributes["connection"] = connection
                if not has_table(connection, VERSION_TABLE):
                    _VERSION.create(connection, checkfirst=False)
                command.upgrade(config, "head")
            connection.commit()
            if connection.execute(sa.select(server_shard.c.name)).first() is None:
                connection.execute(server_shard.insert().values(id=1, name=shard, source=str(uuid.uuid4())))
            connection.commit()
    check(engine, shard)


def check(engine: Engine, shard: str) -> None:
    """Raises StorageFailed if the tables are missing, of a version that cannot be used, or of another shard, or if the
    database logs statements; and UnsafeTable."""
    verify(engine)
    _check_binlog(engine)
    check_version(engine)
    with engine.connect() as connection:
        name = connection.execute(sa.select(server_shard.c.name)).scalar_one_or_none()
        if name != shard:
            raise StorageFailed(
                f"this database is shard {name!r}, but the server calls it {shard!r}: the DSN is that of another "
                f"shard, or --storage should name it {name}=…"
            )


def verify(engine: Engine) -> None:
    """Raises UnsafeTable if an existing table cannot keep a server's guarantees."""
    with engine.connect() as connection:
        guarantees.verify(connection, NEEDS)


def _check_binlog(engine: Engine) -> None:
    """Raises StorageFailed if a MySQL or MariaDB logs statements: it refuses every write of a server (1665)."""
    if engine.dialect.name not in ("mysql", "mariadb"):
        return
    with engine.connect() as connection:
        values = variables(connection, ("log_bin", "binlog_format"))
    if is_on(values.get("log_bin")) and values.get("binlog_format", "").upper() == "STATEMENT":
        raise StorageFailed(
            "binlog_format is STATEMENT, and the database takes no writes at the level that a server needs (READ "
            "COMMITTED): SET GLOBAL binlog_format = 'ROW', and in its configuration"
        )


def check_version(engine: Engine, *, exactly: bool = False) -> None:
    """Raises StorageFailed if the tables are missing, of an older version, or of one that this code cannot use.

    Tables of a newer version are used if they only add to what this code knows: the servers of one database are
    upgraded one by one, and an older one may be restarted meanwhile. `exactly`: refuse any newer version.
    """
    with engine.connect() as connection:
        current, newest = _revision_of(connection), newest_revision()
        if current is None:
            raise StorageFailed(
                "the database has no tables of Notify's server: make them with `notify storage upgrade --storage …`"
            )
        if _is_known(current):
            if current != newest:
                raise StorageFailed(
                    f"the database's tables are of version {current}, this server needs {newest}: "
                    "run `notify storage upgrade --storage …`"
                )
            if missing := _missing_columns(connection, server_half_message):
                raise StorageFailed(
                    f"table {server_half_message.name} lacks {', '.join(missing)}: it is not one that "
                    "`notify storage upgrade` made; rename it, or use another database"
                )
            return
        newer = f"the database's tables are of version {current}, which this server does not know (it knows {newest})"
        unusable = "" if exactly else _unusable(connection)
        if exactly or unusable:
            raise StorageFailed(
                f"{newer}: a newer server made them; upgrade this one{f' ({unusable})' if unusable else ''}"
            )
        log.warning("tables_are_newer", version=current, known=newest, remedy="upgrade this server, too")


def _revision_of(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _is_known(revision: str) -> bool:
    return revision in {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _missing_columns(connection: Connection, table: sa.Table) -> list[str]:
    """The columns that this code uses and a table of the database lacks."""
    present = {str(column["name"]) for column in sa.inspect(connection).get_columns(table.name)}
    return sorted({column.name for column in table.columns} - present)


def _unusable(connection: Connection) -> str:
    """Why tables of a newer version cannot be used; "" if they can."""
    inspector = sa.inspect(connection)
    present = set(inspector.get_table_names())
    for table in (*metadata.sorted_tables, *administration.metadata.sorted_tables):
        if table.name not in present:
            return f"there is no table {table.name}"
        if missing := _missing_columns(connection, table):
            return f"table {table.name} lacks {', '.join(missing)}"
        for column in inspector.get_columns(table.name):
            is_needed = not column["nullable"] and column.get("default") is None
            if is_needed and column["name"] not in table.columns:
                return f"column {column['name']} of table {table.name} needs a value"
    return ""


def newest_revision() -> str:
    """The version of the tables that this code needs."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


WAIT_SECONDS = 30
"""How long an upgrade waits for another process's upgrade."""
_WAITED_IN_VAIN = ("55P03", "57014")
_BUSY = "another process is changing the tables; try again when it is done"


class _alone:
    """Let other processes wait during an upgrade, by an advisory lock; on SQLite its own lock is enough."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name = connection.dialect.name

    def __enter__(self) -> None:
        if self._name == "postgresql":
            # Another process may need longer than the bounds of this session's other statements.
            bounds = [
                f"set_config('{name}', '{WAIT_SECONDS}s', true)" for name in ("lock_timeout", "statement_timeout")
            ]
            self._connection.exec_driver_sql(f"SELECT {', '.join(bounds)}")
            try:
                self._connection.exec_driver_sql("SELECT pg_advisory_lock(7400)")
            except sa.exc.DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _WAITED_IN_VAIN:
                    raise
                raise InvalidRequest(_BUSY) from None
            self._connection.commit()
        elif self._name in ("mysql", "mariadb"):
            got = self._connection.exec_driver_sql(f"SELECT GET_LOCK('notify-schema', {WAIT_SECONDS})").scalar()
            if got != 1:
                raise InvalidRequest(_BUSY)

    def __exit__(self, *exc: object) -> None:
        self._connection.rollback()
        if self._name == "postgresql":
            self._connection.exec_driver_sql("SELECT pg_advisory_unlock(7400)")
        elif self._name in ("mysql", "mariadb"):
            self._connection.exec_driver_sql("SELECT RELEASE_LOCK('notify-schema')")
        self._connection.commit()
