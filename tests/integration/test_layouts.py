"""One shop, unchanged, on every layout of the servers: consumers in `shared` and `ordered` mode, and of batches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from notify.client import Consumer, DeadLetter, Inbox, Message, ReceivedMessage, TransactionProducer, create_tables
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.commands import Command, cli
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.http import admin
from tests.support.kafka import KafkaNode
from tests.support.servers import make_storage, stop_if_running


@dataclass(frozen=True)
class Layout:
    """The addresses that a service needs. The processes behind them run until their stack ends."""

    database_url: str
    """An empty database of the service."""
    send_url: str
    """Where its producer sends."""
    consume_url: str
    """Where its consumer receives."""
    admin_url: str
    """Where its groups and dead letters are administered."""


@dataclass(frozen=True)
class Site:
    """Where a layout is set up."""

    databases: Mapping[str, str]
    """The URLs of database servers by kind."""
    kafka: Callable[[], str]
    """Gives the URL of a Kafka cluster."""
    directory: Path
    stack: ExitStack
    """Ends all that is started."""

    def database(self, kind: str) -> str:
        """The URL of an empty database."""
        return self.stack.enter_context(empty_database(kind, self.databases, self.directory))

    def server(self, name: str, *flags: str) -> ServerProcess:
        """A server that runs."""
        server = ServerProcess(self.directory / name, flags=flags)
        self.stack.callback(stop_if_running, server)
        return server.start()

    def move(self, mover: str, storage: str, target: str) -> None:
        """Start a bridge or relay from a server's database."""
        moving = Command(mover, "--dsn", storage, "--url", target)
        self.stack.callback(moving.close)
        moving.start()


def embedded(site: Site) -> Layout:
    """One server, whose log has transactions and queues."""
    server = site.server("server")
    return Layout(site.database("postgresql"), server.url, server.url, server.url)


def queued(kind: str, mover: str, site: Site) -> Layout:
    """A server over a database, a bridge or relay, and a queue server."""
    storage = site.database(kind)
    make_storage(storage)
    sender = site.server("sender", "--storage", storage)
    queue = site.server("queue", "--registry", storage, "--roles", "queue")
    site.move(mover, storage, queue.url)
    return Layout(site.database(kind), sender.url, queue.url, queue.url)


def over_kafka(kind: str, mover: str, site: Site) -> Layout:
    """A server over a database, which also shows Kafka's groups, a bridge or relay, and Kafka."""
    storage, kafka = site.database(kind), site.kafka()
    make_storage(storage)
    sender = site.server("sender", "--storage", storage, "--kafka", kafka)
    site.move(mover, storage, kafka)
    return Layout(site.database(kind), sender.url, kafka, sender.url)


LAYOUTS: Mapping[str, Callable[[Site], Layout]] = {
    "embedded": embedded,
    "bridge": partial(queued, "mariadb", "bridge"),
    "relay": partial(queued, "postgresql", "relay"),
    "bridge-to-kafka": partial(over_kafka, "mariadb", "bridge"),
    "relay-to-kafka": partial(over_kafka, "postgresql", "relay"),
}


CUSTOMERS = ("ann", "ben", "cleo")
ROUNDS = 6
RETRY_SECONDS = 0.2
DELAY_SECONDS = 1.0
FAILURES = 2
BATCH = 8
CLOCKS = 2
"""A wait may be that many times shorter by this process's clock: servers follow the clock of their database."""


class Base(DeclarativeBase):
    pass


class Placed(Base):
    """An order; it exists only if its transaction committed."""

    __tablename__ = "placed"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(sa.String(80))


class Points(Base):
    """An effect. Only the inbox prevents a second row for an order."""

    __tablename__ = "points"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(sa.String(80))


class ChangedMind(Exception):
    """The customer leaves after the message was sent: the order is rolled back."""


@dataclass(frozen=True)
class Handled:
    """One call of the handler."""

    number: str
    attempt: int
    at: float
    """Seconds since 1970."""


class Shop:
    """A producer that places orders, and a consumer that gives points for them."""

    def __init__(self, layout: Layout, engine: sa.Engine, mode: str, name: str) -> None:
        self.name = name
        self._engine = engine
        self.producer = TransactionProducer(layout.send_url, group=name, engine=engine)
        self.consumer = Consumer(layout.consume_url, group=name, inbox=Inbox(engine), concurrency=4)
        options: dict[str, Any] = {"mode": mode.partition(" ")[0], "start": "earliest", "retry_min": RETRY_SECONDS}
        if mode.endswith("in batches"):
            self.consumer.subscribe(name, batch=BATCH, **options)(self._give_all_points)
        else:
            self.consumer.subscribe(name, **options)(self._give_points)
        self.handled: list[Handled] = []
        self.knows_everyone = False

        @self.producer.transactional(sessionmaker(engine))
        def place(session: Session, number: str, changes_mind: bool, **options: Any) -> None:
            session.add(Placed(number=number))
            self.producer.send(session, Message(name, {"number": number}, **options))
            if changes_mind:
                session.flush()
                raise ChangedMind

        self._place = place

    def place(self, number: str, **options: Any) -> None:
        self._place(number, False, **options)

    def change_mind(self, number: str, **options: Any) -> None:
        with pytest.raises(ChangedMind):
            self._place(number, True, **options)

    def _give_all_points(self, messages: list[ReceivedMessage], session: Session) -> None:
        """A call of several that fails is repeated with its halves: the last calls count."""
        calls: list[Handled] = []
        is_last = len(messages) == 1
        try:
            for message in messages:
                self._give(message, session, calls)
            is_last = True
        finally:
            self.handled += calls if is_last else []

    def _give_points(self, message: ReceivedMessage, session: Session) -> None:
        self._give(message, session, self.handled)

    def _give(self, message: ReceivedMessage, session: Session, calls: list[Handled]) -> None:
        number = message.json()["number"]
        calls.append(Handled(number, message.attempt, time.time()))
        session.add(Points(number=number))
        if "fails" in number and message.attempt <= FAILURES:
            raise RuntimeError("not yet")
        if "stranger" in number and not self.knows_everyone:
            raise DeadLetter("nobody knows this customer")

    def number(self, customer: str, turn: int, kind: str = "") -> str:
        """The number of a customer's order, which says what becomes of it."""
        return f"{self.name} {customer} {turn} {kind}".strip()

    def calls_for(self, number: str) -> list[Handled]:
        """The handler's calls for an order."""
        return [call for call in self.handled if call.number == number]

    def placed(self) -> list[str]:
        """The committed orders, in the order of their rows."""
        return self._numbers(Placed)

    def points(self) -> list[str]:
        """The orders that took effect, in the order of their effects."""
        return self._numbers(Points)

    def _numbers(self, table: type[Placed | Points]) -> list[str]:
        mine = table.number.startswith(f"{self.name} ")
        with Session(self._engine) as session:
            return list(session.scalars(sa.select(table.number).where(mine).order_by(table.id)))


def _marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long) if name == "bridge-to-kafka" else name


@pytest.fixture(scope="module", params=map(_marked, LAYOUTS))
def layout(
    request: pytest.FixtureRequest, database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Layout]:
    def kafka() -> str:
        node: KafkaNode = request.getfixturevalue("kafka_node")
        return node.url

    with ExitStack() as stack:
        yield LAYOUTS[request.param](Site(database_urls, kafka, tmp_path_factory.mktemp(request.param), stack))


@pytest.fixture(scope="module")
def engine(layout: Layout) -> Iterator[sa.Engine]:
    made = sa.create_engine(layout.database_url)
    create_tables(made)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def shop(layout: Layout, engine: sa.Engine, mode: str, unique: str) -> Iterator[Shop]:
    opened = Shop(layout, engine, mode, unique)
    with closing(opened.producer), running(opened.consumer):
        yield opened


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", "ordered", pytest.param("ordered in batches", marks=pytest.mark.long)])
def test_a_shop_keeps_its_promises(layout: Layout, shop: Shop, mode: str) -> None:
    fails, stranger = shop.number("ann", 2, "fails"), shop.number("ben", 3, "stranger")
    orders = {customer: [shop.number(customer, turn) for turn in range(ROUNDS)] for customer in CUSTOMERS}
    orders["ann"][2], orders["ben"][3] = fails, stranger
    late = shop.number("dora", 0)
    asked = time.time()
    shop.place(late, key="dora", delay=DELAY_SECONDS)
    for turn in range(ROUNDS):
        for customer, numbers in orders.items():
            shop.place(numbers[turn], key=customer)
            shop.change_mind(shop.number(customer, turn, "left"), key=customer)
        # The order of a key is that in which its outcomes are recorded, after the commits.
        eventually(lambda: not undecided(layout, shop.name), "the outcomes of a round")

    expected = {late, *(number for numbers in orders.values() for number in numbers)}
    assert set(shop.placed()) == expected
    eventually(lambda: set(shop.points()) == expected - {stranger}, "the points of all but the stranger")
    letters = eventually(lambda: dead_letters(layout, shop.name), "the dead letter")
    assert [json.loads(letter["body"])["number"] for letter in letters] == [stranger]
    assert "nobody knows" in letters[0]["headers"]["notify-dead-letter-reason"]

    shop.knows_everyone = True
    code, _ = cli(
        "dead-letter", "redrive", shop.name, "--max", "100", "--url", layout.admin_url, "--reason", "a test", "--json"
    )
    assert code == 0
    eventually(lambda: set(shop.points()) == expected, "the points of the stranger")
    assert sorted(shop.points()) == sorted(expected)

    first, second, third = shop.calls_for(fails)
    assert [first.attempt, second.attempt, third.attempt] == [1, 2, 3]
    assert second.at - first.at > RETRY_SECONDS / CLOCKS and third.at - second.at > 2 * RETRY_SECONDS / CLOCKS
    assert [call.at > asked + DELAY_SECONDS / CLOCKS for call in shop.calls_for(late)] == [True]
    if mode != "shared":
        for customer, numbers in orders.items():
            one_by_one = [number for number in numbers for _ in range(3 if number == fails else 1)]
            redriven = [stranger] if customer == "ben" else []
            assert [call.number for call in shop.handled if call.number in numbers] == one_by_one + redriven
            in_time = [number for number in numbers if number != stranger]
            assert [number for number in shop.points() if number in numbers] == in_time + redriven


def dead_letters(layout: Layout, group: str) -> list[dict[str, Any]]:
    code, listed = cli("dead-letter", "list", group, "--url", layout.admin_url, "--json")
    assert code == 0, listed
    letters: list[dict[str, Any]] = listed["messages"]
    return letters


def undecided(layout: Layout, group: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = admin(layout.send_url, "GET", f"transactions?producer_group={group}")["transactions"]
    return rows
