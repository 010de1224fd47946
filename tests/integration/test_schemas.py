"""A source is a schema: one producer over many schemas, and checks of lost outcomes that ask in the right one."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome
from notify.client import AsyncTransactionProducer, Inbox, Message, TransactionProducer, create_tables
from notify.client.producer.packing import pack
from notify.client.tables.purge import purge_by_force
from notify.client.tables.schemas import ASK_FIRST
from notify.errors import BindingRefused, InvalidRequest, UnsafeTable
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.dying import lose_outcomes
from tests.support.shop import Order
from tests.support.tenants import (
    WAYS,
    Tenants,
    noted,
    on_postgresql,
    order,
    producing,
    received,
    state_of,
    tenants,
)
from tests.support.transactions import new_id

__all__ = ["on_postgresql", "producing", "tenants"]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_lost_outcomes_of_each_schema(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer, way: str
) -> None:
    """A producer that is started after the first one has died, and has met no schema, answers for all of them."""
    if way == "local" and not tenants.is_postgresql:
        pytest.skip("MySQL has no setting of a transaction for its current database")
    schemas = [tenants.make(name) for name in ("home", "t1", "t2")]
    first = producing(tenants.engine, answer_checks=False)
    lose_outcomes(first)
    ids = noted(first)
    for number in range(2):
        for schema in schemas:
            order(tenants, first, schema, way, f"{schema} {number}")
    dead = {schema: new_id() for schema in schemas}
    for schema, transaction_id in dead.items():
        first.outgoing.store_half(transaction_id, [pack(Message(first.group, "dead"))], tenants.source(schema))
    committed = {body: [id_ for id_ in its if tenants.places_of(id_, *schemas)] for body, its in ids.items()}
    for schema in schemas:
        for number in range(2):
            (transaction_id,) = committed[f"{schema} {number}"]
            assert tenants.places_of(transaction_id, *schemas) == [schema]
    first.close()
    producing(sa.create_engine(tenants.url))
    for body, stored in ids.items():
        expected = {id_: "COMMITTED" if id_ in committed[body] else "ROLLED_BACK" for id_ in stored}
        if body != "dead":
            assert {id_: state_of(memory, id_) for id_ in stored} == expected
    assert {state_of(memory, transaction_id) for transaction_id in dead.values()} == {"ROLLED_BACK"}


@pytest.mark.parametrize("mode", ["half", "outbox"])
def test_statements_where_nothing_changed(
    tenants: Tenants, producing: Callable[..., TransactionProducer], mode: Any
) -> None:
    """One statement for the row, as before; where tenants take turns, one more, and no half is stored in vain."""
    home, one = tenants.make("home"), tenants.make("t1")
    producer = producing(tenants.engine, mode=mode, answer_checks=False)
    ids = noted(producer)
    order(tenants, producer, home, "session", "first")
    statements: list[str] = []
    sa.event.listen(tenants.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    order(tenants, producer, home, "session", "second")
    assert ["half_message" in statement for statement in statements] == [False, False, True]
    order(tenants, producer, one, "session", "third")
    for number in range(3):
        statements.clear()
        order(tenants, producer, (home, one)[number % 2], "session", f"turn {number}")
        assert len(statements) == 4
    assert len(ids["third"]) == (2 if mode == "half" else 0)
    assert all(len(ids[f"turn {number}"]) == (mode == "half") for number in range(3))


@pytest.mark.long
def test_guesses_begin_again(tenants: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    home, one = tenants.make("home"), tenants.make("t1")
    producer = producing(tenants.engine, mode="outbox", answer_checks=False)
    for schema in (home, one):
        order(tenants, producer, schema, "session", "x")
    for _ in range(ASK_FIRST):
        order(tenants, producer, one, "session", "x")
    statements: list[str] = []
    sa.event.listen(tenants.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    order(tenants, producer, one, "session", "x")
    assert len(statements) == 3


@pytest.mark.long
@pytest.mark.parametrize("mode", ["half", "outbox"])
@pytest.mark.parametrize("count", [2, 20])
def test_rows_of_many_messages(
    tenants: Tenants, producing: Callable[..., TransactionProducer], mode: Any, count: int
) -> None:
    """More rows than a guarded statement has, with all sorts of values."""
    schemas = [tenants.make(name) for name in ("home", "t1")]
    producer = producing(tenants.engine, mode=mode)
    for schema in (*schemas, *schemas):
        with tenants.session(schema, "session") as session:
            for number in range(count):
                options: dict[str, Any] = {"key": "ü", "tag": "t", "headers": {"h": "'%s:x"}} if number % 2 else {}
                producer.send(session, Message(producer.group, f"{number}'\\ :x %s", delay=number / 3, **options))
    for schema in schemas:
        assert len(tenants.rows(schema)) == 2 * count


@pytest.mark.long
def test_the_last_search_path_of_a_transaction_counts(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    one, two = tenants.make("t1"), tenants.make("t2")
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    with tenants.session(one, "session") as session:
        producer.send(session, Message(producer.group, "a"))
        session.connection().exec_driver_sql(tenants.going(two, "session"))
        producer.send(session, Message(producer.group, "b"))
    (transaction_id,) = ids["a"]
    assert tenants.places_of(transaction_id, one, two) == [two]
    assert state_of(memory, transaction_id) == "COMMITTED"


@pytest.mark.long
def test_a_named_schema_wins(tenants: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    home, one, two = (tenants.make(name) for name in ("home", "t1", "t2"))
    producer = producing(tenants.engine, schema=one)
    ids = noted(producer)
    for way in WAYS[:1] + WAYS[2:]:
        order(tenants, producer, two, way, way)
        assert tenants.places_of(ids[way][0], home, one, two) == [one]


ODD = ("with space", 'Mixed"Case', "per%cent:colon's", "ünïcode")


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("session", name) for name in ODD),
        ("engine", ODD[2]),
        *(pytest.param("engine", name, marks=pytest.mark.long) for name in (*ODD[:2], *ODD[3:])),
    ],
)
def test_a_schema_with_an_odd_name_is_written_and_read(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer, way: str, name: str
) -> None:
    tenants.make("home")
    schema = tenants.make(name)
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    for number in range(2):
        order(tenants, producer, schema, way, str(number))
    stored = [id_ for its in ids.values() for id_ in its]
    committed = [id_ for id_ in stored if tenants.places_of(id_, schema)]
    assert len(committed) == 2
    assert {state_of(memory, id_) for id_ in committed} == {"COMMITTED"}
    inbox = Inbox(tenants.engine, schema=schema)
    inbox.check()
    message = received()
    assert [inbox.run("g", message, lambda *_: None) for _ in range(2)] == [True, False]
    assert purge_by_force(tenants.engine, older_than=-60, schema=schema).rows >= 2
    assert tenants.rows(schema) == []


def test_a_backslash_where_it_escapes_what_follows(
    on_postgresql: Tenants, producing: Callable[..., TransactionProducer]
) -> None:
    """Where a session had no standard_conforming_strings, commits of a named schema were refused, and checks not
    answered."""
    tenants = on_postgresql

    @sa.event.listens_for(tenants.engine, "connect")
    def set_up(connection: Any, _: object) -> None:
        connection.execute("SET standard_conforming_strings = off")
        connection.commit()

    schema = tenants.make("back\\slash")
    order(tenants, producing(tenants.engine), schema, "engine", "book")
    ((transaction_id, _),) = tenants.rows(schema)
    sold, dead = (HalfMessage(id_, "g", "main", tenants.source(schema), 1, ()) for id_ in (transaction_id, new_id()))
    check = LocalTransactionCheck(tenants.engine).check
    assert (check(sold), check(dead)) == (Outcome.COMMIT, Outcome.ROLLBACK)


@pytest.mark.long
def test_names_that_differ_in_their_case_only(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    small, large = tenants.make("t1"), tenants.make("T1")
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    for schema in (small, large):
        order(tenants, producer, schema, "session", schema)
    assert tenants.places_of(ids[large][-1], small, large) == [large]
    assert state_of(memory, ids[large][-1]) == "COMMITTED"


# --- tenants that come and go ------------------------------------------------------------------------------------


def test_a_tenant_made_while_the_producer_runs(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    """Its checks come at once, not after the next look at all schemas."""
    home = tenants.make("home")
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    order(tenants, producer, home, "session", "old")
    assert state_of(memory, ids["old"][0]) == "COMMITTED"
    new = tenants.make("t9")
    order(tenants, producer, new, "session", "new")
    assert state_of(memory, ids["new"][-1]) == "COMMITTED"


@pytest.mark.long
@pytest.mark.parametrize("way", ["session", "engine"])
def test_a_tenant_dropped_and_made_again(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer, way: str
) -> None:
    """A half may name the source that was dropped; the row that is there proves the commit."""
    one = tenants.make("t1")
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    order(tenants, producer, one, way, "before")
    before = tenants.source(one)
    tenants.drop(one)
    tenants.make("t1")
    assert tenants.source(one) != before
    order(tenants, producer, one, way, "after")
    committed = [id_ for id_ in ids["after"] if tenants.places_of(id_, one)]
    assert len(committed) == 1
    assert state_of(memory, committed[0]) == "COMMITTED"


def test_a_guess_that_was_dropped(tenants: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    """The place of the last transaction is gone: the next one, of another tenant, is not in its way."""
    one, two = tenants.make("t1"), tenants.make("t2")
    producer = producing(tenants.engine)
    ids = noted(producer)
    order(tenants, producer, one, "session", "one")
    tenants.drop(one)
    order(tenants, producer, two, "session", "two")
    assert tenants.places_of(ids["two"][-1], two) == [two]


@pytest.mark.long
def test_a_new_source_id_while_the_producer_runs(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer
) -> None:
    home = tenants.make("home")
    producer = producing(tenants.engine)
    lose_outcomes(producer)
    ids = noted(producer)
    order(tenants, producer, home, "session", "before")
    with tenants.engine.begin() as connection:
        connection.exec_driver_sql(tenants.going(home, "session"))
        connection.exec_driver_sql(f"UPDATE notify_source SET id = '{uuid.uuid4()}'")
    order(tenants, producer, home, "session", "after")
    committed = [id_ for its in ids.values() for id_ in its if tenants.places_of(id_, home)]
    assert len(committed) == 2
    assert {state_of(memory, id_) for id_ in committed} == {"COMMITTED"}


def copy(tenants: Tenants, original: str, name: str) -> str:
    """A tenant made from a template, or from another one's dump: with its source id."""
    schema = tenants.make(name)
    with tenants.engine.begin() as connection:
        table = f"{tenants.quoted(schema)}.notify_source"
        connection.execute(sa.text(f"UPDATE {table} SET id = :id".replace("%", "%%")), {"id": tenants.source(original)})
    return schema


@pytest.mark.parametrize("fresh", [False, True])
def test_a_copy_of_a_tenant(
    tenants: Tenants,
    producing: Callable[..., TransactionProducer],
    memory: InMemoryServer,
    caplog: pytest.LogCaptureFixture,
    fresh: bool,
) -> None:
    """Two schemas have one source id: both are asked, and the log says how to part them."""
    one = tenants.make("t1")
    producer = producing(tenants.engine, answer_checks=not fresh)
    lose_outcomes(producer)
    ids = noted(producer)
    order(tenants, producer, one, "session", "original")
    two = copy(tenants, one, "t2")
    order(tenants, producer, two, "session", "copy")
    producer.outgoing.store_half(dead := new_id(), [pack(Message(producer.group, "dead"))], tenants.source(one))
    with caplog.at_level(logging.WARNING, "notify.check"):
        if fresh:
            producing(sa.create_engine(tenants.url))
        states = [state_of(memory, id_) for id_ in (ids["original"][-1], ids["copy"][-1], dead)]
    assert states == ["COMMITTED", "COMMITTED", "ROLLED_BACK"]
    assert f"'{one}', '{two}' have the same source id" in caplog.text


# --- refused ------------------------------------------------------------------------------------------------------


def test_a_tenant_without_tables(tenants: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    home, one = tenants.make("home"), tenants.make("t1", tables=False)
    producer = producing(tenants.engine)
    order(tenants, producer, home, "session", "x")
    for way in ("session", "engine"):
        with pytest.raises(BindingRefused, match=r"nothing is committed.*no table half_message.*create_tables"):
            order(tenants, producer, one, way, "refused")
    order(tenants, producer, home, "session", "x")
    with tenants.engine.connect() as connection:
        orders = connection.exec_driver_sql(f"SELECT count(*) FROM {tenants.quoted(one)}.orders").scalar()
    assert orders == 0


def test_a_source_in_another_schema_only(on_postgresql: Tenants, producing: Callable[..., TransactionProducer]) -> None:
    tenants = on_postgresql
    tenants.make("home")
    one = tenants.make("t1")
    tenants.run("DROP TABLE t1.notify_source")
    producer = producing(tenants.engine)
    for mode_producer in (producer, producing(tenants.engine, mode="outbox")):
        with pytest.raises(BindingRefused, match=r"'t1' has half_message.*create_tables\(engine, schema='t1'\)"):
            with sa.orm.Session(tenants.engine) as session, session.begin():
                session.connection().exec_driver_sql("SET search_path TO t1, public")
                mode_producer.send(session, Message(producer.group, "x"))
    create_tables(tenants.engine, schema=one)
    with sa.orm.Session(tenants.engine) as session, session.begin():
        session.connection().exec_driver_sql("SET search_path TO t1, public")
        producer.send(session, Message(producer.group, "x"))
    assert len(tenants.rows(one)) == 1


def test_a_temporary_table_of_the_same_name(
    on_postgresql: Tenants, producing: Callable[..., TransactionProducer]
) -> None:
    tenants = on_postgresql
    home = tenants.make("home")
    producer = producing(tenants.engine)
    order(tenants, producer, home, "session", "x")
    with pytest.raises(UnsafeTable, match="temporary table"), tenants.session(home, "session") as session:
        session.connection().exec_driver_sql("CREATE TEMPORARY TABLE half_message (LIKE half_message)")
        producer.send(session, Message(producer.group, "x"))


def test_without_a_current_schema_one_has_to_be_named(
    tenants: Tenants, producing: Callable[..., TransactionProducer]
) -> None:
    home = tenants.make("home")
    if tenants.is_postgresql:
        engine = sa.create_engine(tenants.url, connect_args={"options": "-c search_path="})
    else:
        engine = sa.create_engine(sa.make_url(tenants.url)._replace(database=None))
    producer = producing(engine, answer_checks=False)
    with pytest.raises(BindingRefused, match="no table"):
        with sa.orm.Session(engine) as session, session.begin():
            producer.send(session, Message(producer.group, "x"))
    with pytest.raises(InvalidRequest, match="name one with schema="):
        create_tables(engine)
    named = producing(engine, schema=home, answer_checks=False)
    with sa.orm.Session(engine) as session, session.begin():
        named.send(session, Message(producer.group, "x"))
    assert len(tenants.rows(home)) == 1
    engine.dispose()


# --- roles, many tenants, coroutines ------------------------------------------------------------------------------


def test_the_search_path_of_a_role(
    on_postgresql: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer, unique: str
) -> None:
    """A role that sees one schema of two, by ALTER ROLE: its producer does not ask for what it may not answer."""
    tenants = on_postgresql
    home, one = tenants.make("home"), tenants.make("t1")
    role = unique
    tenants.run(
        f"CREATE ROLE {role} LOGIN", f"ALTER ROLE {role} SET search_path = t1",
        f"GRANT USAGE ON SCHEMA t1, public TO {role}", f"GRANT ALL ON ALL TABLES IN SCHEMA t1 TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA t1 TO {role}", f"GRANT SELECT ON public.notify_source TO {role}",
    )  # fmt: skip
    engine = sa.create_engine(sa.make_url(tenants.url).set(username=role))
    try:
        producer = producing(engine)
        lose_outcomes(producer)
        ids = noted(producer)
        with sa.orm.Session(engine) as session, session.begin():
            session.add(Order(item="x"))
            producer.send(session, Message(producer.group, "x"))
        assert tenants.places_of(ids["x"][0], home, one) == [one]
        assert state_of(memory, ids["x"][0]) == "COMMITTED"
        with pytest.raises(CheckUnavailable, match="came from source"):
            half = HalfMessage(new_id(), "g", "main", tenants.source(home), 1, ())
            LocalTransactionCheck(engine).check(half)
    finally:
        producer.close()
        engine.dispose()
        tenants.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.long
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.long)])
def test_many_tenants_of_one_producer(
    tenants: Tenants, producing: Callable[..., TransactionProducer], memory: InMemoryServer, count: int
) -> None:
    """Threads that take connections from one pool, each for another tenant; every third outcome is lost."""
    schemas = [tenants.make(f"t{number}") for number in range(count)]
    producer = producing(tenants.engine)
    ids = noted(producer)
    outcome_soon, numbers = producer.outgoing.outcome_soon, iter(range(1 << 30))
    lock = threading.Lock()

    def lose_some(*given: Any) -> None:
        with lock:
            number = next(numbers)
        if number % 3:
            outcome_soon(*given)

    producer.outgoing.outcome_soon = lose_some  # type: ignore[method-assign]

    def work(number: int) -> None:
        schema = schemas[number % count]
        order(tenants, producer, schema, "session", f"{schema} {number}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(3 * count)))
    for number in range(3 * count):
        schema = schemas[number % count]
        its = ids[f"{schema} {number}"]
        committed = [id_ for id_ in its if tenants.places_of(id_, schema)]
        assert len(committed) == 1
        assert state_of(memory, committed[0]) == "COMMITTED"
        assert all(state_of(memory, id_) == "ROLLED_BACK" for id_ in its if id_ not in committed)


DRIVERS = {"postgresql": ("asyncpg", "psycopg"), "mysql": ("aiomysql", "asyncmy")}


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_an_async_producer_stores_each_tenants_message_in_its_schema(
    tenants: Tenants, memory: InMemoryServer, unique: str, number: int
) -> None:
    schemas = [tenants.make(name) for name in ("home", "t1", "t2")]
    dialect = tenants.engine.dialect.name
    url = sa.make_url(tenants.url).set(drivername=f"{dialect}+{DRIVERS[dialect][number]}")
    ids: dict[str, list[str]] = defaultdict(list)

    async def run() -> None:
        engine = create_async_engine(url)
        async with AsyncTransactionProducer(
            memory.url, group=unique, engine=engine, half_timeout=PATIENCE_SECONDS
        ) as producer:
            store_half = producer.outgoing.store_half

            def note(transaction_id: str, messages: Any, source: str) -> Any:
                ids[messages[0].body.decode()].append(transaction_id)
                return store_half(transaction_id, messages, source)

            producer.outgoing.store_half = note  # type: ignore[method-assign]
            producer.outgoing.outcome_soon = lambda *_: None  # type: ignore[method-assign]
            for turn in range(2):
                for schema in schemas:
                    async with AsyncSession(engine) as session, session.begin():
                        await (await session.connection()).exec_driver_sql(tenants.going(schema, "session"))
                        session.add(Order(item="x"))
                        for text in (f"{schema} {turn}", "more"):
                            await producer.send(session, Message(unique, text))
            for schema in schemas:
                for turn in range(2):
                    committed = [id_ for id_ in ids[f"{schema} {turn}"] if tenants.places_of(id_, schema)]
                    assert len(committed) == 1
                    state = await asyncio.to_thread(state_of, memory, committed[0])
                    assert state == "COMMITTED"
        await engine.dispose()

    asyncio.run(run())


# --- tables, inbox, purge -----------------------------------------------------------------------------------------


def test_tables_are_made_in_one_schema(tenants: Tenants) -> None:
    """Although the search_path, or the current database, leads to a schema that has them."""
    home = tenants.make("home")
    one = tenants.make("t1", tables=False)
    engine = tenants.engine.execution_options(schema_translate_map={None: one})
    source = create_tables(engine)
    assert (source, create_tables(tenants.engine, schema=one)) == (tenants.source(one),) * 2
    assert source != tenants.source(home) == create_tables(tenants.engine)
    with tenants.engine.connect() as connection:
        assert connection.get_execution_options().get("schema_translate_map") is None
        tables = set(sa.inspect(connection).get_table_names(schema=one))
    assert {"half_message", "notify_source", "notify_inbox", "notify_refused"} <= tables
    with pytest.raises(InvalidRequest, match="'nowhere'"):
        create_tables(tenants.engine, schema="nowhere")


@pytest.mark.parametrize("leaks", [False, True])
def test_an_inbox_stays_in_its_schema(tenants: Tenants, leaks: bool) -> None:
    """A handler leaves its session elsewhere, for the redelivery that gets it from the pool."""
    home, one = tenants.make("home"), tenants.make("t1")
    engine = sa.create_engine(tenants.url, pool_size=1, max_overflow=0)
    inbox = Inbox(engine)
    inbox.check()
    message, effects = received(), []

    def handle(message: Any, session: Any) -> None:
        effects.append(message.id)
        session.connection().exec_driver_sql(tenants.going(one, "session"))

    if leaks:
        with engine.begin() as connection:
            connection.exec_driver_sql(tenants.going(one, "session"))
    assert [inbox.run("g", message, handle) for _ in range(3)] == [True, False, False]
    assert inbox.run_batch("g", [message, received()], handle_all(tenants, one)) == 1
    assert len(effects) == 1
    assert inbox.place(None) == home  # type: ignore[arg-type]
    engine.dispose()


def handle_all(tenants: Tenants, schema: str) -> Callable[[Any, Any], None]:
    def handle(messages: Any, session: Any) -> None:
        session.connection().exec_driver_sql(tenants.going(schema, "session"))

    return handle
