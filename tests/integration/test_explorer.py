"""The crash explorer finds the planted faults of a shop, at the step where they show, and nothing in a careful shop."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.client import (
    AsyncConsumer,
    AsyncTransactionProducer,
    Consumer,
    Inbox,
    Message,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.client.tables.outbox import Outbox
from notify.errors import InvalidRequest, Timeout
from notify.movers.relay.by_id import ById
from notify.protocol.message import ReceivedMessage
from notify.runtime.threads import in_thread
from notify.testing import Exploration, InMemoryServer, Process, explore, explorer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("item", sa.String(50)))
points = sa.Table("points", metadata, sa.Column("item", sa.String(50)))
stock = sa.Table("stock", metadata, sa.Column("left", sa.Integer))
CAUSES, EFFECTS = "SELECT item FROM orders", "SELECT item FROM points"
Place = Callable[[sa.Engine, TransactionProducer], object]


def place(engine: sa.Engine, producer: TransactionProducer) -> None:
    with Session(engine) as session, session.begin():
        session.execute(orders.insert().values(item="book"))
        producer.send(session, Message("order.placed", "book"))


def place_early(engine: sa.Engine, producer: TransactionProducer) -> None:
    """The planted fault: the message is published before the commit."""
    with Session(engine) as session, session.begin():
        session.execute(orders.insert().values(item="book"))
        producer.publish(Message("order.placed", "book"))


def place_whatever_happens(engine: sa.Engine, producer: TransactionProducer) -> None:
    """The planted fault: an error of the commit is swallowed."""
    with Session(engine) as session:
        session.execute(orders.insert().values(item="book"))
        producer.send(session, Message("order.placed", "book"))
        try:
            session.commit()
        except DBAPIError:
            session.rollback()


def started(process: Process) -> TransactionProducer:
    """The tables and the producer of a new process of the shop."""
    metadata.create_all(process.engine)
    create_tables(process.engine)
    half_timeout = PATIENCE_SECONDS
    return TransactionProducer(process.url, group="orders", engine=process.engine, half_timeout=half_timeout)


def booking(process: Process) -> Consumer:
    """The consumer of a new process of the shop."""
    consumer = Consumer(process.url, group="points", inbox=Inbox(process.engine))

    @consumer.subscribe("order.placed", start="earliest")
    def book(message: ReceivedMessage, session: Session) -> None:
        session.execute(points.insert().values(item=message.text))

    return consumer


def shop(process: Process, place: Place = place) -> None:
    producer = started(process)
    process.run(producer, booking(process))
    process.act(place, process.engine, producer)


def found(explored: Exploration, name: str) -> explorer.Finding:
    """The shortest finding, which has this name, as all others."""
    assert {finding.name for finding in explored.findings} == {name}, explored
    shortest = explored.shortest
    assert shortest is not None and explored.missed == ()
    assert str(explored).count(str(shortest)) == 1
    return shortest


def explored(service: Callable[[Process], None], **options: Any) -> Exploration:
    return explore(service, **({"causes": CAUSES, "effects": EFFECTS, "seconds": PATIENCE_SECONDS} | options))


@pytest.fixture(params=["postgresql", "mysql", pytest.param("mariadb", marks=pytest.mark.long)])
def server_url(request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    with empty_database(request.param, database_urls, tmp_path) as url:
        yield url


# --- a careful service ----------------------------------------------------------------------------------------


@pytest.mark.notify_crashes(causes=CAUSES, effects=EFFECTS, seconds=PATIENCE_SECONDS)
def test_a_careful_shop_has_no_findings(notify_process: Process) -> None:
    shop(notify_process)


@pytest.mark.long
def test_each_step_of_a_careful_shop_is_tried() -> None:
    seen = explored(shop)
    assert seen.findings == () and seen.missed == (), seen
    for what in (
        "before INSERT INTO orders", "before the half of", "after the half of", "before INSERT INTO main.half_message",
        "before COMMIT", "after COMMIT", "before the outcome of", "before the handler of", "before INSERT INTO points",
        "before ack", "after ack",
    ):  # fmt: skip
        assert any(step.what.startswith(what) for step in seen.steps), (what, seen.steps)
    # Two transactions commit: the order's, and the inbox's. Each COMMIT also fails in two ways.
    assert seen.runs == len(seen.steps) + 4
    lines = {step.code for step in seen.steps if Path(step.file) == Path(__file__)}
    assert 'session.execute(orders.insert().values(item="book"))' in lines
    assert str(seen) == f"no findings in {seen.runs} runs of {len(seen.steps)} steps"


@pytest.mark.long
@pytest.mark.notify_crashes(causes=CAUSES, effects=EFFECTS, database="server_url", seconds=PATIENCE_SECONDS)
def test_a_careful_shop_on_a_database_server(notify_process: Process, server_url: str) -> None:
    assert notify_process.database == server_url
    shop(notify_process)


@pytest.mark.long
@pytest.mark.notify_crashes(causes=CAUSES, effects=EFFECTS, real=True, seconds=PATIENCE_SECONDS)
def test_a_careful_shop_of_real_processes(notify_process: Process) -> None:
    shop(notify_process)


async def place_async(engine: Any, producer: AsyncTransactionProducer) -> None:
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(stock.update().values(left=stock.c.left - 1))
        await session.execute(orders.insert().values(item="book"))
        await producer.send(session, Message("order.placed", "book"))


ASYNC_DRIVERS = {"psycopg": "postgresql", "asyncpg": "postgresql"}


@pytest.mark.long
@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
def test_a_careful_shop_of_coroutines(driver: str, database_urls: Mapping[str, str], tmp_path: Path) -> None:
    """A killed process whose connection is not cut would keep the row of the stock locked, also for the explorer."""
    kind = ASYNC_DRIVERS[driver]

    def async_shop(process: Process) -> None:
        metadata.create_all(process.engine)
        create_tables(process.engine)
        engine = create_async_engine(process.database)
        half_timeout = PATIENCE_SECONDS
        producer = AsyncTransactionProducer(process.url, group="orders", engine=engine, half_timeout=half_timeout)
        consumer = AsyncConsumer(process.url, group="points", inbox=Inbox(engine))

        @consumer.subscribe("order.placed")
        async def book(message: ReceivedMessage, session: AsyncSession) -> None:
            await session.execute(points.insert().values(item=message.text))

        process.run(producer, consumer)
        process.act(place_async, engine, producer)

    with empty_database(kind, database_urls, tmp_path) as url:
        given = sa.make_url(url)
        engine = sa.create_engine(given)
        metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(stock.insert().values(left=100))
        engine.dispose()
        seen = explored(async_shop, database=given.set(drivername=f"{kind}+{driver}"))
    assert seen.findings == (), seen
    assert any("session.execute(orders" in step.code for step in seen.steps)


def relaying(process: Process) -> None:
    """Its messages wait in an outbox, which a relay of the same process moves."""
    metadata.create_all(process.engine)
    create_tables(process.engine)
    producer = TransactionProducer(process.url, group="orders", engine=process.engine, mode="outbox")
    process.run(producer, booking(process))
    process.relay()
    process.act(place, process.engine, producer)


@pytest.mark.long
def test_each_step_of_a_relay_is_tried() -> None:
    seen = explored(relaying)
    assert seen.findings == () and seen.missed == (), seen
    whats = {step.what.partition(" of ")[0] for step in seen.steps if step.code == "process.relay()"}
    assert {
        "before the relay sends order.placed", "after the relay has sent order.placed", "before COMMIT", "after COMMIT",
    } <= whats  # fmt: skip
    assert any(what.startswith("before UPDATE half_message SET relayed") for what in whats), whats
    # Three transactions commit: the order's, the relay's mark, and the inbox's.
    assert seen.runs == len(seen.steps) + 6


@pytest.mark.long
def test_a_relay_on_a_database_server(server_url: str) -> None:
    seen = explored(relaying, database=server_url)
    assert seen.findings == () and seen.missed == (), seen
    assert any(step.what.startswith("after the relay has sent") for step in seen.steps)


@pytest.mark.long
def test_a_slow_answer_to_a_check_is_waited_for() -> None:
    """The clock was moved meanwhile, so that it was asked again, and each answer came too late: IN_DOUBT."""

    def slow(process: Process) -> None:
        producer = started(process)
        if process.is_restarted:

            @sa.event.listens_for(process.engine, "before_cursor_execute")
            def wait(connection: Any, cursor: Any, statement: str, *given: Any) -> None:
                if "half_message" in statement:
                    time.sleep(3 * explorer.IDLE_SECONDS)  # how long the database takes

        process.run(producer)
        process.act(place, process.engine, producer)

    seen = explore(slow, seconds=PATIENCE_SECONDS)
    assert seen.findings == () and seen.runs, seen


# --- planted faults -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_relay_that_marks_before_it_sends_loses_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def move(self: ById, outbox: Outbox) -> bool:
        page = await in_thread(self._rows.page, outbox, None, ())
        if page.transactions:
            await in_thread(self._rows.note, outbox, [t.id for t in page.transactions], [])
            await self._sink.put(page.transactions, page.source)
            self._total.sent += len(page.transactions)
        return False

    monkeypatch.setattr(ById, "move", move)
    lost = [finding for finding in explored(relaying).findings if finding.name == "LOST"]
    places = {(found.fault.step.what, found.fault.step.code) for found in lost if found.fault is not None}
    assert ("after COMMIT", "process.relay()") in places, lost


def test_an_outbox_without_a_relay() -> None:
    def without_a_relay(process: Process) -> None:
        started(process)
        producer = TransactionProducer(process.url, group="orders", engine=process.engine, mode="outbox")
        process.run(producer, booking(process))
        process.act(place, process.engine, producer)

    seen = explored(without_a_relay)
    assert seen.runs == 0 and "UNDELIVERED: 1 rows of the outbox wait for a relay" in str(seen)


def test_a_relay_without_an_outbox() -> None:
    def without_tables(process: Process) -> None:
        process.relay()
        process.act(metadata.create_all, process.engine)

    with pytest.raises(InvalidRequest, match="has neither half_message nor"):
        explore(without_tables)


def publishing_early(process: Process) -> None:
    """Its consumer begins after the act, so that no step of a handler comes between those of the act."""
    producer = started(process)
    process.run(producer)
    try:
        process.act(place_early, process.engine, producer)
    finally:
        process.run(booking(process))


@pytest.mark.long
@pytest.mark.parametrize("real", [False, True])
def test_a_message_that_is_published_before_the_commit_is_a_ghost(real: bool) -> None:
    finding = found(explored(publishing_early, real=real), "GHOST")
    assert finding.fault is not None and finding.fault.is_kill
    step = finding.fault.step
    assert step.what == "after publishing order.placed"
    assert step.code == 'producer.publish(Message("order.placed", "book"))'
    assert "effects without a cause: 'book'" in finding.detail
    whats = [before.what for before in finding.before]
    assert whats[0].startswith("before INSERT INTO orders") and whats[1:] == ["before publishing order.placed"]


@pytest.mark.long
def test_an_effect_outside_of_the_inboxs_transaction_happens_twice() -> None:
    paid: list[str] = []

    def paying(process: Process) -> None:
        producer = started(process)
        consumer = Consumer(process.url, group="points", inbox=Inbox(process.engine))
        if not process.is_restarted:
            paid.clear()

        @consumer.subscribe("order.placed")
        def pay(message: ReceivedMessage, session: Session) -> None:
            paid.append(message.text)

        process.run(producer, consumer)
        process.act(place, process.engine, producer)

    finding = found(explored(paying, effects=lambda connection: paid), "DUP_EFFECT")
    assert finding.fault is not None and finding.fault.step.what == "before COMMIT"
    assert finding.fault.step.code == '@consumer.subscribe("order.placed")' and finding.fault.is_kill
    assert "'book' (1 times)" not in finding.detail and "'book'" in finding.detail


@pytest.mark.long
def test_an_effect_in_a_session_of_its_own_happens_twice(server_url: str) -> None:
    def booking_apart(process: Process) -> None:
        producer = started(process)
        consumer = Consumer(process.url, group="points", inbox=Inbox(process.engine))

        @consumer.subscribe("order.placed")
        def book(message: ReceivedMessage, session: Session) -> None:
            with Session(process.engine) as own, own.begin():
                own.execute(points.insert().values(item=message.text))

        process.run(producer, consumer)
        process.act(place, process.engine, producer)

    finding = found(explored(booking_apart, database=server_url), "DUP_EFFECT")
    assert finding.fault is not None and finding.fault.step.what == "after COMMIT"
    assert finding.fault.step.code == "with Session(process.engine) as own, own.begin():"


@pytest.mark.long
def test_an_error_of_the_commit_that_is_swallowed_loses_the_order() -> None:
    finding = found(explored(lambda process: shop(process, place_whatever_happens)), "LOST")
    assert finding.fault is not None and not finding.fault.is_kill
    assert (finding.fault.step.what, finding.fault.step.code) == ("before COMMIT", "session.commit()")
    assert "the act returned as if it had succeeded" in finding.detail
    assert "the database refused the COMMIT" in str(finding)


@pytest.mark.long
def test_an_error_that_a_handler_swallows_loses_the_effect() -> None:
    def booking_whatever_happens(process: Process) -> None:
        producer = started(process)
        consumer = Consumer(process.url, group="points")

        @consumer.subscribe("order.placed")
        def book(message: ReceivedMessage) -> None:
            with Session(process.engine) as session:
                if not session.scalar(sa.select(sa.func.count()).select_from(points)):
                    session.execute(points.insert().values(item=message.text))
                try:
                    session.commit()
                except DBAPIError:
                    session.rollback()

        process.run(producer, consumer)
        process.act(place, process.engine, producer)

    finding = found(explored(booking_whatever_happens), "ACKED_NO_EFFECT")
    assert finding.fault is not None and not finding.fault.is_kill
    assert (finding.fault.step.what, finding.fault.step.code) == ("before COMMIT", "session.commit()")


def test_a_fault_that_needs_no_crash_is_told_before_anything_is_killed() -> None:
    seen = explored(shop, effects="SELECT item FROM points WHERE item = 'pen'")
    assert seen.runs == 0 and [finding.name for finding in seen.findings] == ["ACKED_NO_EFFECT"]
    assert "without any fault" in str(seen)


def test_effects_may_be_read_through_an_engine_of_the_test(tmp_path: Path) -> None:
    """It was taken for the service's, so that the explorer died in place of the process that it had killed."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/ledger.db")
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(points.insert().values(item="book"))

    def read(_: sa.Connection) -> list[str]:
        with engine.connect() as connection:
            return list(connection.scalars(sa.select(points.c.item)))

    def ordering(process: Process) -> None:
        metadata.create_all(process.engine)
        process.act(order, process.engine)

    def order(own: sa.Engine) -> None:
        with own.begin() as connection:
            connection.execute(orders.insert().values(item="book"))

    seen = explored(ordering, causes=read, effects=read)
    assert seen.findings == () and seen.runs == len(seen.steps) + 2, seen
    engine.dispose()


def test_the_names_of_findings_are_the_audits() -> None:
    from notify.spark.judge.findings import BY_NAME

    names = set(re.findall(r'^\s+(?:yield )?"([A-Z_]+)",', Path(explorer.__file__).read_text(), re.MULTILINE))
    assert len(names) >= 6 and names <= BY_NAME.keys()


# --- mistakes -------------------------------------------------------------------------------------------------


def test_an_act_without_steps() -> None:
    with pytest.raises(InvalidRequest, match=r"process\.act"):
        explore(lambda process: None)


def test_an_act_that_what_outlives_a_process_keeps_from_its_steps() -> None:
    """No fault was tried, and nothing was said about it."""
    items = ["book"]

    def act(engine: sa.Engine) -> None:
        item = items.pop()
        with engine.begin() as connection:
            connection.execute(orders.insert().values(item=item))

    def ordering(process: Process) -> None:
        metadata.create_all(process.engine)
        process.act(act, process.engine)

    with pytest.raises(InvalidRequest, match="something that outlives a process") as raised:
        explore(ordering)
    assert isinstance(raised.value.__cause__, IndexError), "what the act said"


def test_a_clock_that_does_not_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration never ended, or said at once that the act had not returned in time."""

    def act() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: 2e9)  # as freezegun does: by its date, later than any deadline
            threading.Event().wait(1)  # the explorer looks meanwhile
        has_ended.set()

    has_ended = threading.Event()
    with pytest.raises(InvalidRequest, match="does not advance"):
        explore(lambda process: process.act(act))
    assert has_ended.wait(PATIENCE_SECONDS)
    with monkeypatch.context() as patch, pytest.raises(InvalidRequest, match="does not advance"):
        patch.setattr(time, "monotonic", lambda: 2e9)
        explore(shop)


GREEN = """
from gevent import monkey
monkey.patch_all()
from notify.errors import InvalidRequest
from notify.testing import explore
for real in (False, True):
    try:
        explore(print, real=real)
    except InvalidRequest as error:
        print(error)
"""


def test_greenlets_in_the_place_of_threads_are_refused() -> None:
    """The exploration ended with a bare Crashed, or a broken pipe."""
    pytest.importorskip("gevent")
    done = subprocess.run([sys.executable, "-c", GREEN], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    told = done.stdout.splitlines()
    assert len(told) == 2 and all("gevent has put greenlets" in line for line in told), done.stdout + done.stderr


def test_a_query_of_a_module_whose_path_begins_as_the_sdks_is_a_step() -> None:
    calls = "def ask(engine):\n    with engine.begin() as connection:\n        connection.exec_driver_sql('SELECT 1')\n"
    shop_module: dict[str, Any] = {}
    exec(compile(calls, f"{Path(explorer.__file__).parents[1]}_shop.py", "exec"), shop_module)
    seen = explore(lambda process: process.act(shop_module["ask"], process.engine))
    assert any(step.what == "before SELECT 1" for step in seen.steps), seen.steps


def test_an_act_without_causes() -> None:
    with pytest.raises(InvalidRequest, match="returned no row"):
        explored(shop, causes="SELECT item FROM orders WHERE 1 = 0", effects="SELECT item FROM points WHERE 1 = 0")


def test_a_service_that_is_a_coroutine_function() -> None:
    async def service(process: Process) -> None:
        raise AssertionError("nobody awaits it")

    with pytest.raises(InvalidRequest, match="a plain function, without async"):
        explore(service)


def test_a_producer_of_another_server(notify_server: InMemoryServer) -> None:
    def elsewhere(process: Process) -> None:
        process.run(TransactionProducer(notify_server.url, group="orders", engine=process.engine))

    with pytest.raises(InvalidRequest, match=r"give the producer the address process\.url"):
        explore(elsewhere)


def test_causes_without_effects() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        explore(shop, causes=CAUSES)


@pytest.mark.long
def test_an_act_with_too_many_steps() -> None:
    with pytest.raises(InvalidRequest, match="most_steps is 3"):
        explored(shop, most_steps=3)


@pytest.mark.long
def test_an_act_that_does_not_return() -> None:
    def waiting(process: Process) -> None:
        process.act(threading.Event().wait)

    with pytest.raises(Timeout, match="did not return within 5 s"):
        explore(waiting, seconds=5)


@pytest.mark.parametrize("real", [False, True])
def test_a_service_that_fails_by_itself(real: bool) -> None:
    def failing(process: Process) -> None:
        raise ValueError("a mistake of the test")

    with pytest.raises(RuntimeError if real else ValueError, match="a mistake of the test"):
        explore(failing, real=real)


def test_an_engine_that_several_processes_use(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shared.db")
    use_explicit_begin(engine)

    def sharing(process: Process) -> None:
        started(process)
        consumer = Consumer(process.url, group="points", inbox=Inbox(engine))
        consumer.subscribe("order.placed")(lambda message, session: None)
        process.run(consumer)

    create_tables(engine)
    with pytest.raises(InvalidRequest, match="belongs to a process that was killed"):
        explore(sharing)
    engine.dispose()


FILE = """
import pytest
import sqlalchemy as sa
from notify.client import Message, TransactionProducer

def start(process):
    with process.engine.begin() as connection:
        for table in ("orders", "points"):
            connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {table} (item TEXT)")
    return TransactionProducer(process.url, group="g")

@pytest.mark.notify_crashes(causes="SELECT item FROM orders", effects="SELECT item FROM points")
def test_shop(notify_process):
    producer = start(notify_process)
    notify_process.act(place, notify_process)

def place(process):
    for table in ("orders", "points"):
        with process.engine.begin() as connection:
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES ('book')")

def test_without_the_mark(notify_process):
    pass
"""


@pytest.mark.long
def test_a_marked_test_fails_with_the_shortest_step(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FILE)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:xdist", "test_it.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "1 failed, 1 error" in said, said
    assert "ACKED_NO_EFFECT: causes without an effect, although their messages are settled: 'book'; killed" in said
    assert "after COMMIT at test_it.py:19\n    with process.engine.begin() as connection:" in said
    assert "the steps that led there:" in said and "1. before INSERT INTO orders" in said
    assert "notify_process belongs to the mark: @pytest.mark.notify_crashes" in said
