"""A consumer of batches that kills its process at one of the worst moments of a batch."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, ReceivedMessage
from notify.testing import forked
from tests.support.clock import PATIENCE_SECONDS
from tests.support.shop import Order, make_engine

POINTS = ("in the handler", "after the commit")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


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
    """Let a process consume until it dies at one of POINTS. Returns its exit code; None if it lives on."""
    process = forked.context().Process(target=_consume, args=(url, group, dsn, point, batch), daemon=True)
    process.start()
    process.join(PATIENCE_SECONDS)
    code = process.exitcode
    process.kill()
    return code
