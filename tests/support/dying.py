"""Producers and consumers that die, or seem to die, at one of the worst moments of their transaction."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, Message, ReceivedMessage, TransactionProducer
from notify.client.producer.outgoing import ThreadOutgoing
from notify.client.producer.producer import ThreadProducer
from notify.protocol.wire import Item, PackedMessage
from notify.testing import forked
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import Order, make_engine

POINTS = ("after half", "after local commit", "before outcome")


def _die_at(point: str, outgoing: ThreadOutgoing) -> None:
    """Make a producer kill this process at a point."""
    store_half = outgoing.store_half

    def half_and_die(transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        store_half(transaction_id, messages, source)
        _die()

    def die_first(transaction_id: str, shard: str | None, outcome: str) -> None:
        _die()

    if point == "after half":
        outgoing.store_half = half_and_die  # type: ignore[method-assign]
    elif point == "before outcome":
        outgoing.outcome_soon = die_first  # type: ignore[method-assign]


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def _order(url: str, group: str, dsn: str, point: str) -> None:
    """Place an order with a message, both named after the point, in the topic named after the group."""
    engine = make_engine(dsn)
    producer = TransactionProducer(url, group=group, engine=engine, half_timeout=PATIENCE_SECONDS)
    _die_at(point, producer.outgoing)
    if point == "after local commit":
        dialect: Any = engine.dialect
        commit = dialect.do_commit
        dialect.do_commit = lambda connection: (commit(connection), _die())
    with Session(engine) as session, session.begin():
        session.add(Order(item=point))
        producer.send(session, Message(group, point))


def lose_outcomes(producer: ThreadProducer) -> None:
    """Lose all outcomes of a producer, as if it were killed after each COMMIT."""
    producer.outgoing.outcome_soon = lambda *_: None  # type: ignore[method-assign]


def order_and_die(url: str, group: str, dsn: str, point: str) -> int | None:
    """Let a process place an order and die at one of POINTS. Returns its exit code; None if it lives on."""
    process = forked.context().Process(target=_order, args=(url, group, dsn, point))
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode


POINTS_OF_BATCHES = ("in the handler", "after the commit")


def _consume(url: str, group: str, dsn: str, point: str, batch: int) -> None:
    """Order an item for each message of the topic named after the group, and die in the first batch of several."""
    if url.startswith("kafka"):
        from notify.client.kafka import feed
        from tests.support.kafka_consumers import SESSION_SECONDS

        feed.SESSION_SECONDS = SESSION_SECONDS  # killed, it holds its partitions for so long
    engine = make_engine(dsn)
    dialect: Any = engine.dialect
    commit = dialect.do_commit
    handled: list[int] = []

    def commit_and_die(connection: Any) -> None:
        commit(connection)
        if handled and point == "after the commit":
            _die()

    dialect.do_commit = commit_and_die
    consumer = Consumer(url, group=group, inbox=Inbox(engine), lease=1, concurrency=1)

    @consumer.subscribe(group, start="earliest", batch=batch)
    def handle(messages: list[ReceivedMessage], session: Session) -> None:
        for n, message in enumerate(messages):
            session.add(Order(item=message.text))
            if n and point == "in the handler":
                session.flush()
                _die()
        handled.append(len(messages))

    consumer.run(signals=False)


def consume_and_die(url: str, group: str, dsn: str, point: str, batch: int) -> int | None:
    """Let a process consume until it dies at one of POINTS_OF_BATCHES. Returns its exit code; None if it lives on."""
    process = forked.context().Process(target=_consume, args=(url, group, dsn, point, batch), daemon=True)
    process.start()
    process.join(PATIENCE_SECONDS)
    code = process.exitcode
    process.kill()
    return code
