"""Tables that others have changed, and rows that a role may not see: refused at the start, before anything is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck
from notify.check.question import read_source
from notify.client import Inbox, Message, TransactionProducer, create_tables
from notify.client.tables.creation import new_source
from notify.client.tables.definitions import notify_source
from notify.client.tables.purge import purge_by_force
from notify.errors import BindingRefused, HiddenRows, InvalidRequest
from notify.movers.relay.leases import leases_of
from notify.movers.relay.relay import Relay
from notify.movers.relay.sources import Sources
from notify.protocol.message import ReceivedMessage
from notify.runtime.clock import wall_clock
from notify.storage.sql import schema
from notify.storage.sql.engines import open_engine
from notify.storage.sql.store import SqlStore
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import cli
from tests.support.databases import MOST, empty_database
from tests.support.shop import Base, Order, Shop, items, make_engine
from tests.support.spoiled import MYSQLS, a_view, partitioned, spoil, without_key
from tests.support.transactions import new_id

GROUP = "stock"


def order(shop: Shop, item: str) -> None:
    with shop.sessions.begin() as session:
        session.add(Order(item=item))
        shop.send(session, {"item": item})


def pool_of(shop: Shop) -> sa.QueuePool:
    assert isinstance(shop.engine.pool, sa.QueuePool)
    return shop.engine.pool


def message() -> ReceivedMessage:
    return ReceivedMessage(f"{new_id()}.0", "orders", 0, 0, b"{}", None, None, {}, 1, "2026-01-01T00:00:00Z")


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_producer_s_first_commit_is_refused(
    shop_engine: sa.Engine, database: str, memory: InMemoryServer, unique: str
) -> None:
    """A tombstone would not exclude a commit that comes after it."""
    spoil(shop_engine, partitioned(database, "half_message"))
    with closing(Shop(shop_engine, memory, unique).producer) as producer:
        with Session(shop_engine) as session:
            session.add(Order(item="lost"))
            producer.send(session, Message(unique, {}))
            with pytest.raises(InvalidRequest, match="no key over") as refused:
                session.commit()
    assert refused.value.code == "unsafe_table" and items(shop_engine) == [] and not memory.halves(unique)


def test_a_running_producer_finds_it_with_its_next_pool(
    shop_engine: sa.Engine, database: str, memory: InMemoryServer, unique: str
) -> None:
    shop = Shop(shop_engine, memory, unique)
    order(shop, "before")
    eventually(lambda: not pool_of(shop).checkedout(), "the look for schemas to end")
    shop.engine.dispose()
    spoil(shop.engine, partitioned(database, "half_message"))
    with pytest.raises(InvalidRequest, match="no key over"):
        order(shop, "after")
    assert items(shop.engine) == ["before"]
    spoil(shop.engine, ["DROP TABLE half_message"])
    create_tables(shop.engine)
    order(shop, "mended")
    assert len(shop.messages()) == 2


def test_an_outbox_works_with_partitions_by_time(
    shop_engine: sa.Engine, database: str, server: ServerProcess, unique: str
) -> None:
    """Nobody checks the rows of an outbox."""
    spoil(shop_engine, partitioned(database, "half_message"))
    with TransactionProducer(server.url, group=unique, engine=shop_engine, mode="outbox") as producer:
        with Session(shop_engine) as session, session.begin():
            session.add(Order(item="moved"))
            producer.send(session, Message(unique, {}))
    assert asyncio.run(Relay(shop_engine, server.url).run(once=True)).sent == 1


def half_of(engine: sa.Engine) -> HalfMessage:
    with engine.connect() as connection:
        return HalfMessage(new_id(), "shop", "main", read_source(connection)[0], 1, ())


def test_a_check_is_not_answered(shop_engine: sa.Engine, database: str) -> None:
    half = half_of(shop_engine)
    spoil(shop_engine, partitioned(database, "half_message"))
    with pytest.raises(CheckUnavailable, match="no key over"):
        LocalTransactionCheck(shop_engine).check(half)


def test_an_inbox_grants_no_claim(shop_engine: sa.Engine, database: str) -> None:
    """With a key that has the time, each delivery takes effect."""
    spoil(shop_engine, partitioned(database, "notify_inbox"))
    inbox, received, effects = Inbox(shop_engine), message(), []

    def handle(_: ReceivedMessage, session: Session) -> None:
        effects.append(session)

    for attempt in (
        inbox.check,
        lambda: inbox.run(GROUP, received, handle),
        lambda: inbox.run_batch(GROUP, [received], handle),
    ):
        with pytest.raises(InvalidRequest, match="no key over"):
            attempt()
    assert effects == []


@pytest.mark.parametrize("database", [*MYSQLS])
def test_a_table_without_transactions_is_refused(
    shop_engine: sa.Engine, database: str, memory: InMemoryServer, unique: str
) -> None:
    """MyISAM keeps the row of a transaction that was rolled back, which a check would take for a commit."""
    spoil(shop_engine, ["ALTER TABLE half_message ENGINE=MyISAM", "ALTER TABLE notify_inbox ENGINE=MyISAM"])
    with closing(Shop(shop_engine, memory, unique).producer) as producer, Session(shop_engine) as session:
        producer.send(session, Message(unique, {}))
        with pytest.raises(InvalidRequest, match="engine MyISAM"):
            session.commit()
    with pytest.raises(InvalidRequest, match="engine MyISAM"):
        Inbox(shop_engine).check()


@pytest.mark.parametrize("database", ["mysql"])
def test_groups_that_differ_in_case_are_two(shop_engine: sa.Engine, database: str) -> None:
    """After CONVERT TO CHARACTER SET, the effect of one group would count as that of the other."""
    spoil(shop_engine, ["ALTER TABLE notify_inbox CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_ai_ci"])
    with pytest.raises(InvalidRequest, match="treats different names as equal"):
        Inbox(shop_engine).check()


def test_purge_refuses_a_view(shop_engine: sa.Engine, database: str) -> None:
    spoil(shop_engine, a_view("half_message"))
    with pytest.raises(InvalidRequest, match="half_message is a view"):
        purge_by_force(shop_engine, older_than=0)


def test_doctor_says_what_to_do(shop_engine: sa.Engine, database: str, memory: InMemoryServer) -> None:
    url = shop_engine.url.render_as_string(hide_password=False)
    spoil(shop_engine, [*partitioned(database, "half_message"), *without_key(database, "notify_inbox")])
    code, said = cli("doctor", "--url", memory.url, "--dsn", url, "--json")
    half, inbox = [finding for finding in said["findings"] if "no key over" in finding]
    assert code == 1 and "make (transaction_id, message_no) its primary key again" in half
    assert "make (consumer_group, message_id, replay) its primary key again" in inbox


SWALLOWS = {
    "sqlite": ["CREATE TRIGGER {0}_t BEFORE INSERT ON {0} BEGIN SELECT RAISE(IGNORE); END"],
    "postgresql": [
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER {0}_t BEFORE INSERT ON {0} FOR EACH ROW EXECUTE FUNCTION swallow()",
    ],
}
"""Triggers that leave out rows without an error, as those of old ways to partition tables do."""


@pytest.mark.parametrize("database", [*SWALLOWS])
def test_a_row_that_a_trigger_leaves_out_is_missed(
    shop_engine: sa.Engine, database: str, memory: InMemoryServer, unique: str
) -> None:
    spoil(shop_engine, [statement.format("half_message") for statement in SWALLOWS[database]])
    with closing(Shop(shop_engine, memory, unique).producer) as producer, Session(shop_engine) as session:
        producer.send(session, Message(unique, {}))
        with pytest.raises(BindingRefused, match="nothing is committed"):
            session.commit()
    spoil(shop_engine, [SWALLOWS[database][-1].format("notify_inbox")])
    inbox, received = Inbox(shop_engine), [message() for _ in range(3)]
    for attempt in (
        lambda: inbox.run(GROUP, received[0], lambda *_: None),
        lambda: inbox.run_batch(GROUP, received, lambda *_: None),
    ):
        with pytest.raises(InvalidRequest, match="would take effect again: drop the trigger"):
            attempt()


# --- rows that a role may not see ---------------------------------------------------------------------------------


class Few:
    """A PostgreSQL with a service's tables and 20 outbox rows, and a role that may use them all, if policies let it."""

    def __init__(self, url: str) -> None:
        self.owner = make_engine(url)
        create_tables(self.owner)
        Base.metadata.create_all(self.owner)
        self.role = f"few_{self.owner.url.database}"
        self.url: URL = self.owner.url.set(username=self.role, password="few")
        self.do(f"CREATE ROLE {self.role} LOGIN PASSWORD 'few'", *self.rights())
        self.engine = make_engine(self.text)

    def rights(self) -> list[str]:
        return [f"GRANT ALL ON {what} IN SCHEMA public TO {self.role}" for what in ("ALL TABLES", "ALL SEQUENCES")]

    @property
    def text(self) -> str:
        return self.url.render_as_string(hide_password=False)

    def do(self, *statements: str) -> None:
        spoil(self.owner, statements)

    def hide(self, *tables: str) -> None:
        self.do(*(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY" for table in tables))

    def rows(self, topic: str, number: int = 20, schema: str | None = None) -> None:
        url = "http://127.0.0.1:9"
        with TransactionProducer(url, group=topic, engine=self.owner, mode="outbox", schema=schema) as producer:
            for n in range(number):
                with Session(self.owner) as session, session.begin():
                    session.add(Order(item=str(n)))
                    producer.send(session, Message(topic, {"n": n}))

    def close(self) -> None:
        self.engine.dispose()
        self.do(f"DROP OWNED BY {self.role}", f"DROP ROLE {self.role}")
        self.owner.dispose()


@pytest.fixture
def few(database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[Few]:
    with empty_database("postgresql", database_urls, tmp_path) as url, closing(Few(url)) as made:
        yield made


def refused(*words: str) -> str:
    code, said = cli(*words)
    assert code == 2, said
    return str(said["text"])


@pytest.mark.long
def test_a_relay_that_may_not_see_the_outbox_does_not_say_that_it_is_empty(
    few: Few, server: ServerProcess, unique: str
) -> None:
    few.rows(unique)
    few.hide("half_message")
    words = ("relay", "--once", "--dsn", few.text, "--url", server.url)
    assert "row level security may hide rows of the table public.half_message from SELECT" in refused(*words)
    few.do(f"CREATE POLICY seen ON half_message FOR SELECT TO {few.role} USING (true)")
    assert "from UPDATE" in refused(*words)  # it would be sent, and never marked
    few.do(f"CREATE POLICY marks ON half_message FOR UPDATE TO {few.role} USING (true)")
    code, said = cli(*words, "--json")
    assert (code, said["sent"]) == (0, 20)


def test_a_relay_that_may_not_see_the_list_of_refused_messages_is_refused(few: Few, server: ServerProcess) -> None:
    few.hide("notify_refused")
    assert "public.notify_refused" in refused("relay", "--once", "--dsn", few.text, "--url", server.url)
    few.do(f"ALTER ROLE {few.role} BYPASSRLS")
    assert cli("relay", "--once", "--dsn", few.text, "--url", server.url)[0] == 0


def test_rows_that_become_hidden_end_a_relay_that_runs(few: Few) -> None:
    sources = Sources(few.engine, leases := leases_of(few.engine), "relay")
    with closing(leases):
        sources.find()
        few.hide("half_message")
        with pytest.raises(HiddenRows):
            sources.find()


@pytest.mark.long
def test_a_relay_of_schemas_moves_the_others_and_says_which_it_may_not_see(
    few: Few, server: ServerProcess, unique: str
) -> None:
    for name in ("t_1", "t_2"):
        few.do(f"CREATE SCHEMA {name}", f"GRANT USAGE ON SCHEMA {name} TO {few.role}")
        create_tables(few.owner, name)
        few.do(f"GRANT ALL ON ALL TABLES IN SCHEMA {name} TO {few.role}")
        few.rows(unique, 3, name)
    few.hide("t_1.half_message")
    words = ("relay", "--once", "--schemas", "t_*", "--dsn", few.text, "--url", server.url)
    assert "rows of 1 schemas may wait unseen (t_1: row level security may hide rows" in refused(*words)
    few.do("ALTER TABLE t_1.half_message DISABLE ROW LEVEL SECURITY")
    code, said = cli(*words, "--json")
    assert (code, said["sent"]) == (0, 3)  # those of t_2 were moved before


@pytest.mark.parametrize("table", ["half_message", "notify_source"])
def test_commands_that_look_into_tables_are_refused(few: Few, server: ServerProcess, table: str) -> None:
    few.hide(table)
    database = ("--dsn", few.text)
    for words in (
        ("check", *database, "--group", "shop", "--url", server.url),
        ("purge", *database, "--url", server.url),
        ("purge", *database, "--force"),
        ("refused", "list", *database),
        ("refused", "drop", *database, "--all", "--reason", "none"),
    ):
        assert f"row level security may hide rows of the table public.{table}" in refused(*words), words
    code, said = cli("doctor", "--url", server.url, *database, "--json")
    assert code == 1 and any(table in finding and few.role in finding for finding in said["findings"])
    assert "waiting_for_relay" not in said


def test_checks_are_not_answered_by_a_role_that_may_not_see_the_row(few: Few) -> None:
    half = half_of(few.owner)
    few.hide("half_message")
    with pytest.raises(CheckUnavailable, match="row level security"):
        LocalTransactionCheck(few.engine).check(half)


def test_a_tenant_s_producer_may_send_what_another_role_checks(few: Few, memory: InMemoryServer, unique: str) -> None:
    """Its policy lets it write and see its own rows. A role that sees all rows answers checks."""
    few.hide("half_message")
    few.do(
        f"CREATE POLICY own ON half_message TO {few.role} USING (producer_group = current_setting('app.tenant', true))"
    )

    @sa.event.listens_for(few.engine, "begin")
    def tenant(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL app.tenant = '{unique}'")

    shop = Shop(few.engine, memory, unique)
    order(shop, "sold")
    assert len(shop.messages()) == 1


def test_a_hidden_source_is_not_made_a_second_time(few: Few) -> None:
    """create_tables took a source id that it may not see for none, and wrote another."""
    few.hide("notify_source")
    few.do(f"CREATE POLICY w ON notify_source FOR INSERT TO {few.role} WITH CHECK (true)")
    for call in (create_tables, new_source):
        with pytest.raises(InvalidRequest, match=r"public\.notify_source"), few.engine.begin() as connection:
            call(connection)
    with few.owner.connect() as connection:
        assert len(connection.execute(sa.select(notify_source)).all()) == 1


def test_an_inbox_that_may_not_see_its_rows_is_refused(few: Few) -> None:
    few.hide("notify_inbox")
    few.do(f"CREATE POLICY w ON notify_inbox FOR INSERT TO {few.role} WITH CHECK (true)")
    with pytest.raises(InvalidRequest, match=r"public\.notify_inbox from SELECT"):
        Inbox(few.engine).check()
    few.do(f"CREATE POLICY r ON notify_inbox FOR SELECT TO {few.role} USING (true)")
    Inbox(few.engine).check()
    with pytest.raises(InvalidRequest, match=r"public\.notify_inbox from DELETE"):
        Inbox(few.engine).purge(90_000)


# --- a server's own tables ----------------------------------------------------------------------------------------


def opens(url: str) -> str:
    async def run() -> None:
        store = SqlStore(url, "main")
        try:
            await store.open(wall_clock())
            await store.close()
        finally:
            store.engine.dispose()

    try:
        asyncio.run(run())
    except InvalidRequest as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("table", ["server_half_message", "server_schema_version", "server_credential"])
def test_a_server_that_may_not_see_its_tables_does_not_start(few: Few, table: str) -> None:
    storage = open_engine(few.owner.url.render_as_string(hide_password=False))
    schema.upgrade(storage, "main")
    storage.dispose()
    few.do(*few.rights())
    assert opens(few.text) == ""
    few.hide(table)
    assert f"public.{table}" in opens(few.text)
    for words in (["upgrade"], ["nodes"], ["key-map"], ["forget", "a"]):
        assert f"public.{table}" in refused("storage", *words, "--storage", few.text)


@pytest.mark.parametrize("database", MOST)
def test_a_server_does_not_start_on_a_table_whose_key_is_another(engine_url: str, database: str) -> None:
    engine = open_engine(engine_url)
    schema.upgrade(engine, "main")
    spoil(engine, partitioned(database, "server_half_message"))
    engine.dispose()
    assert "no key over (transaction_id, message_no) that holds (" in opens(engine_url)


# --- bridges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", [*MYSQLS])
@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (["ALTER TABLE half_message ENGINE=MyISAM"], "has the engine MyISAM"),
        (a_view("half_message"), "is a view, not a table"),
        (["ALTER TABLE notify_refused DROP PRIMARY KEY"], "notify_refused has no key"),
    ],
)
def test_a_bridge_does_not_start_on_tables_that_break_promises(
    shop_engine: sa.Engine, database: str, server: ServerProcess, statements: list[str], says: str
) -> None:
    """The binlog has MyISAM's rows although their transaction was rolled back, and a view's under another name."""
    spoil(shop_engine, statements)
    url = shop_engine.url.render_as_string(hide_password=False)
    code, said = cli("bridge", "--once", "--dsn", url, "--url", server.url, "--json")
    assert code == 1 and says in said["stopped"][0]
