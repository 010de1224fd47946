"""Consumers of a bench in one process: those of notify/cli/bench/consumers.py, with inboxes and typed handlers too, and
clients of the same servers, and of Kafka, without the SDK.

Run as `python -m tools.bench.clients`, as notify/cli/bench/consumers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify.cli.bench import consumers
from notify.cli.bench.consumers import CONCURRENCY, Group, Run, Script, in_threads
from notify.client import Inbox, ReceivedMessage, create_tables, use_explicit_begin
from notify.client.tables.definitions import notify_inbox
from notify.protocol import ids
from notify.protocol.wire import RUN_HEAD, SettleItem
from notify.runtime.databases import database_now

KAFKA_BATCH = 500
"""Records between two commits of the plain consumer of Kafka."""


class Order(msgspec.Struct):
    """The body that a filled topic has with `orders`."""

    number: int
    text: str


def _engine(run: Run) -> sa.Engine:
    """An engine of the database that the specification names, with Notify's tables."""
    engine = sa.create_engine(run.spec["inbox"], pool_size=CONCURRENCY, max_overflow=0)
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    create_tables(engine)
    return engine


async def _async_engine(run: Run) -> AsyncEngine:
    dsn = run.spec["inbox"].replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(dsn, pool_size=CONCURRENCY, max_overflow=0)
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    return engine


def handler_of(spec: dict[str, Any]) -> Callable[[Group], Callable[..., None]]:
    """Gives each group the empty handler that the specification asks for."""

    def handler(group: Group) -> Callable[..., None]:
        note, note_all = group.note, group.note_all

        def batch(messages: list[ReceivedMessage]) -> None:
            note_all([message.id for message in messages])

        def single_typed(order: Order) -> None:
            note(order.number)

        def batch_typed(orders: list[Order]) -> None:
            note_all([order.number for order in orders])

        def single_inbox(message: ReceivedMessage, session: Session) -> None:
            note(message.id)

        def batch_inbox(messages: list[ReceivedMessage], session: Session) -> None:
            note_all([message.id for message in messages])

        if spec.get("typed"):
            return batch_typed if spec.get("batch") else single_typed
        if spec.get("inbox"):
            return batch_inbox if spec.get("batch") else single_inbox
        return batch if spec.get("batch") else group.handler()

    return handler


def threads(run: Run) -> None:
    """A `Consumer` for each group."""
    consumers.threads(run, handler_of(run.spec), Inbox(_engine(run)) if run.spec.get("inbox") else None)


def coroutines(run: Run) -> None:
    """An `AsyncConsumer` for each group, all on one event loop."""
    asyncio.run(_coroutines(run))


async def _coroutines(run: Run) -> None:
    if not run.spec.get("inbox"):
        await consumers.on_a_loop(run, handler_of(run.spec))
        return
    engine = await _async_engine(run)
    try:
        await consumers.on_a_loop(run, handler_of(run.spec), Inbox(engine))
    finally:
        await engine.dispose()


# --- what an inbox does, without the SDK: a transaction by SQLAlchemy with the row and the handler's effect ----------

_INSERT = notify_inbox.insert().values(created_at=database_now())


def _rows(group: Group, run: Run) -> Iterator[dict[str, Any]]:
    """A row for each message of a pile, until the run is over."""
    for number in itertools.count():
        if run.is_over or number >= group.expected:
            return
        yield {"consumer_group": group.name, "message_id": f"{ids.to_text(ids.new_id())}.0", "replay": 0}


def by_hand(run: Run) -> None:
    """Transactions of a Session in as many threads as a `Consumer` has, on SQLite one after the other."""
    engine = _engine(run)
    (group,) = run.groups
    rows, taking = _rows(group, run), threading.Lock()  # threads cannot run a generator at once
    turn = threading.Lock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()

    def work() -> None:
        while True:
            with taking:
                row = next(rows, None)
            if row is None:
                return
            with turn, Session(engine) as session, session.begin():
                session.execute(_INSERT, row)
                group.note(row["message_id"])

    in_threads(run, [work] * CONCURRENCY)


def by_hand_async(run: Run) -> None:
    """`by_hand` with an AsyncSession, in as many tasks as an `AsyncConsumer` has."""
    asyncio.run(_by_hand_async(run))


async def _by_hand_async(run: Run) -> None:
    engine = await _async_engine(run)
    (group,) = run.groups
    rows = _rows(group, run)
    turn = asyncio.Lock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()

    async def work() -> None:
        for row in rows:
            async with turn, AsyncSession(engine) as session, session.begin():
                await session.execute(_INSERT, row)
                group.note(row["message_id"])

    await asyncio.gather(*[work() for _ in range(CONCURRENCY)])
    await engine.dispose()


def plain_runs(run: Run) -> None:
    """The same script, which asks for runs: it settles each run as one range."""
    in_threads(run, [functools.partial(_plain_runs, run, group) for group in run.groups])


def _plain_runs(run: Run, group: Group) -> None:
    with contextlib.closing(Script(run.spec["url"], group.name)) as script:
        while not run.is_over:
            runs = script.received("receive?runs=yes")["runs"]
            receipts = [_handle_run(group, each) for each in runs]
            script.settle([SettleItem(receipt=receipt, action="ack") for receipt in receipts])


def _handle_run(group: Group, run: dict[str, Any]) -> str:
    """Handle each message of a run with its id as text, as the other form of the answer has it; the run's receipts."""
    heads = RUN_HEAD.iter_unpack(run["heads"])
    for (transaction, number, _), _message in zip(heads, run["messages"], strict=True):
        group.note(f"{ids.to_text(transaction)}.{number}")
    return f"{run['lease']}.0-{len(run['messages']) - 1}"


def confluent(run: Run) -> None:
    """For each group a consumer as the manual of Kafka's client has it: a batch, its handlers one by one, a commit."""
    in_threads(run, [functools.partial(_confluent, run, group) for group in run.groups])


def _confluent(run: Run, group: Group) -> None:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": run.spec["url"].removeprefix("kafka://"),
            "group.id": group.name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe(run.spec["topics"])
    note = group.note
    while not run.is_over:
        records = [record for record in consumer.consume(KAFKA_BATCH, 1.0) if record.error() is None]
        for record in records:
            note((record.partition(), record.offset()))
        if records:
            consumer.commit(asynchronous=False)
    consumer.close()


CLIENTS: dict[str, Callable[[Run], None]] = consumers.CLIENTS | {
    "plain_runs": plain_runs,
    "threads": threads,
    "coroutines": coroutines,
    "confluent": confluent,
    "by_hand": by_hand,
    "by_hand_async": by_hand_async,
}


if __name__ == "__main__":
    consumers.main(CLIENTS)
