"""A producer in a process of its own, which kills itself at one of the worst moments of its transaction."""

from __future__ import annotations

import os
import signal
from typing import Any

from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.testing import forked
from notify.wire import Item, PackedMessage
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import Order, make_engine

POINTS = ("after half", "after local commit", "before outcome")


class _Dying(TransactionProducer):
    point = ""

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        item = super().store_half(transaction_id, messages, source)
        if self.point == "after half":
            _die()
        return item

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        if self.point == "before outcome":
            _die()
        super().outcome_soon(transaction_id, shard, outcome)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _order(url: str, group: str, dsn: str, point: str) -> None:
    """An order with a message, both named after the point, in the topic named after the group."""
    engine = make_engine(dsn)
    producer = _Dying(url, group=group, engine=engine, half_timeout=PATIENCE_SECONDS)
    producer.point = point
    if point == "after local commit":
        dialect: Any = engine.dialect
        commit = dialect.do_commit
        dialect.do_commit = lambda connection: (commit(connection), _die())
    with Session(engine) as session, session.begin():
        session.add(Order(item=point))
        producer.send(session, Message(group, point))


def order_and_die(url: str, group: str, dsn: str, point: str) -> int | None:
    """Have an order placed by a process that dies at one of POINTS; its exit code, None where it goes on living."""
    process = forked.context().Process(target=_order, args=(url, group, dsn, point))
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode
