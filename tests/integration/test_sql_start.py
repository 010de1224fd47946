"""The start of a server over a database: which tables it takes, and the one line that says why it takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.errors import InvalidRequest, StorageFailed, Unavailable
from notify.protocol.wire import decode_payload
from notify.runtime.clock import wall_clock as now
from notify.storage.members import Member
from notify.storage.records import State
from notify.storage.sql import registry, schema
from notify.storage.sql.engines import open_engine, opened
from notify.storage.sql.shards import open_storage
from notify.storage.sql.store import SqlStore
from notify.storage.sql.tables import server_key_map_change
from notify.testing.process import ServerProcess
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.servers import make_storage
from tests.support.sql_storage import use
from tests.support.transactions import new_id, sent

pytestmark = pytest.mark.usefixtures("patient_writers")


def refusal(url: str, shard: str = "main") -> str:
    async def run() -> None:
        store = SqlStore(url, shard)
        try:
            await store.open(now())
        finally:
            store.engine.dispose()

    with pytest.raises(StorageFailed) as refused:
        asyncio.run(run())
    return str(refused.value)


def test_tables_of_another_version_are_named(engine_url: str, database: str) -> None:
    if database == "sqlite":
        pytest.skip("a SQLite file is the server's own: it makes its tables itself")
    assert "notify storage upgrade" in refusal(engine_url)
    engine = open_engine(engine_url)
    schema.upgrade(engine, "main")
    schema.upgrade(engine, "main")  # the second upgrade does nothing
    assert "shard 'main'" in refusal(engine_url, "other")
    with engine.begin() as connection:  # as version 0002 left it
        server_key_map_change.drop(connection)
        connection.exec_driver_sql("UPDATE server_schema_version SET version_num = '0002'")
    assert "are of version 0002" in refusal(engine_url)
    schema.upgrade(engine, "main")
    assert sa.inspect(engine).has_table(server_key_map_change.name)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE server_half_message DROP COLUMN attempts")
    assert "lacks attempts" in refusal(engine_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE server_schema_version SET version_num = '9999'")
    assert "lacks attempts" in refusal(engine_url)
    engine.dispose()


@pytest.mark.long
def test_a_server_goes_on_with_newer_tables_that_only_have_more(engine_url: str) -> None:
    """During a rolling upgrade an older server restarts on newer tables that only have more. It was refused."""
    make_storage(engine_url)

    def alter(*statements: str) -> None:
        engine = open_engine(engine_url)
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        engine.dispose()

    alter(
        "CREATE TABLE server_more (id INTEGER NOT NULL)",
        "ALTER TABLE server_half_message ADD COLUMN more INTEGER",
        "ALTER TABLE server_member ADD COLUMN more INTEGER NOT NULL DEFAULT 5",
        "UPDATE server_schema_version SET version_num = '9999'",
    )

    async def scenario(store: SqlStore) -> None:
        t = sent()
        await store.put([t], now())
        assert (await store.decide([(t.id, "g", State.COMMITTED)], now()))[0].changed
        with store.engine.begin() as connection:
            registry.heartbeat(connection, Member("server-x", "server"))

    use(engine_url, scenario)
    make_storage(engine_url)  # an upgrade by the older version does nothing
    use(engine_url, scenario)
    alter("ALTER TABLE server_revision RENAME TO server_revision_2")
    assert "newer server" in refusal(engine_url) and "no table server_revision" in refusal(engine_url)


def test_a_database_of_another_encoding_is_used(database_urls: Mapping[str, str]) -> None:
    """In one of SQL_ASCII the driver read texts as bytes, and SQLAlchemy failed with a TypeError."""
    url = sa.make_url(database_urls["postgresql"])
    name = f"t{new_id()[-12:]}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    place = url.set(database=name).render_as_string(hide_password=False)
    try:
        make_storage(place)

        async def scenario(store: SqlStore) -> None:
            t = sent(key="ключ")
            await store.put([t], now())
            stored = await store.transaction(t.id)
            assert stored is not None and decode_payload(stored.messages[0].payload).key == "ключ"

        use(place, scenario)
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        server.dispose()


def test_a_server_says_in_one_line_why_it_does_not_start(tmp_path: Path) -> None:
    for flags, reason in (
        (["--storage", "postgresql://nobody@127.0.0.1:9/none"], "refuses"),
        (["--storage", "no-url"], "not a URL"),
        (["--roles", "queue", "--registry", f"sqlite:///{tmp_path}/r.db"], "no tables"),
    ):
        server = ServerProcess(tmp_path, flags=flags)
        with pytest.raises(Unavailable):
            server.start()
        said = "".join(server.output)
        assert server.process is not None and server.process.returncode == 2
        assert reason in said and "Traceback" not in said, said


NEED_TABLES = (
    "storage nodes --storage", "storage key-map --storage", "storage key-map --shards a,b --storage",
    "storage forget bridge-x --storage", "purge --force --dsn", "relay --once --url http://127.0.0.1:9 --dsn",
)  # fmt: skip
MAKE_TABLES = ("storage upgrade --storage", "refused list --dsn")


@pytest.mark.long
def test_commands_say_what_to_do_about_a_database(database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """Where it is unreachable, or has no tables, one sentence says so. Each command but the relay ended with a
    traceback."""
    (tmp_path / "empty.db").touch()
    with (
        empty_database("postgresql", database_urls, tmp_path) as postgresql,
        empty_database("mariadb", database_urls, tmp_path) as mariadb,
    ):
        for command in NEED_TABLES:
            for empty in (f"sqlite:///{tmp_path}/empty.db", postgresql, mariadb):
                code, said = cli(*command.split(), empty)
                assert code == 2 and "notify storage upgrade" in said["text"], (command, said)
    for command in (*NEED_TABLES, *MAKE_TABLES):
        for away in (f"sqlite:///{tmp_path}/none/x.db", "postgresql://x@127.0.0.1:9/x", "mysql://x@127.0.0.1:9/x"):
            code, said = cli(*command.split(), away, "--json")
            assert code == 2 and ("Start it" in said["text"] or "cannot continue" in said["text"]), (command, said)


def test_members_are_shown_for_people_and_as_json(tmp_path: Path) -> None:
    """The figures of a bridge were a dictionary of Python, with a time in microseconds."""
    url = f"sqlite:///{tmp_path}/storage.db"
    assert cli("storage", "upgrade", "--storage", url)[0] == 0
    detail = {"read_through_us": 1_700_000_000_000_000, "lag": 0.25}
    with opened(url) as engine, engine.begin() as connection:
        registry.heartbeat(connection, Member("bridge-shop", "bridge", detail=detail))
        registry.heartbeat(connection, Member("s-1", "server", "http://h:7400", ("queue", "checks"), ("main",)))
    code, shown = cli("storage", "nodes", "--storage", url)
    head, *rows = [line.split("\t") for line in shown["text"].splitlines()]
    assert (code, head) == (0, ["name", "kind", "url", "roles", "shards", "last seen", "detail"])
    (bridge, server) = rows
    assert bridge[:5] + bridge[6:] == [
        "bridge-shop", "bridge", "-", "-", "-", "lag 0.25, read through 2023-11-14T22:13:20Z"
    ]  # fmt: skip
    assert server[:5] + server[6:] == ["s-1", "server", "http://h:7400", "queue; checks", "main", "-"]
    assert all(row[5].endswith(" s ago") for row in rows)
    code, shown = cli("storage", "nodes", "--storage", url, "--json")
    assert [(m["name"], m["roles"], m["detail"]) for m in shown["members"]] == [
        ("bridge-shop", [], detail), ("s-1", ["queue", "checks"], {})
    ]  # fmt: skip


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    assert "refuses" in refusal("postgresql://nobody:x@127.0.0.1:9/none")
    for url, reason in (
        ("no-url", "not a URL"), ("oracle://x", "oracle"), ("", "empty"),
        ("sqlite:///a sqlite:///b", "shard's name"), ("a=sqlite:///x a=sqlite:///y", "same shard name"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=reason):
            open_storage(url, "main", retention_us=0, writers=1)
