"""Producers that die, or seem to die, at one of the worst moments of their transaction."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.client.outgoing import ThreadOutgoing
from notify.client.producer import ThreadProducer
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
