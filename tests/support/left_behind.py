"""Producers in mode auto: their commits, their rows, and what a queue server has of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer
from notify.client.tables.definitions import half_message
from notify.testing import forked
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import ask
from tests.support.shop import make_engine

BOUND = 0.25
"""How long a commit waits for the server."""


def auto(server: ServerProcess, engine: Any, group: str, **options: Any) -> TransactionProducer:
    """A producer in mode auto; `options` of TransactionProducer."""
    return TransactionProducer(
        server.url, group=group, engine=engine, mode="auto", **{"half_timeout": BOUND, **options}
    )


def send(producer: TransactionProducer, topic: str, *bodies: str, key: str | None = None) -> None:
    """One transaction for each body."""
    for body in bodies:
        with Session(producer._plan.engine) as session, session.begin():
            producer.send(session, Message(topic, body, key=key))


def _leave_and_die(url: str, group: str, dsn: str, messages: Sequence[tuple[str, str | None]]) -> None:
    producer = TransactionProducer(url, group=group, engine=make_engine(dsn), mode="auto", half_timeout=BOUND)
    for body, key in messages:
        send(producer, group, body, key=key)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_and_die(url: str, group: str, dsn: str | sa.URL, messages: Sequence[tuple[str, str | None]]) -> None:
    """Let a process commit a transaction for each body and key, in the topic named after the group, and be killed. The
    server is unreachable, or does not answer."""
    if isinstance(dsn, sa.URL):
        dsn = dsn.render_as_string(hide_password=False)
    process = forked.context().Process(target=_leave_and_die, args=(url, group, dsn, messages))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL


def of_key(key: str, *bodies: str) -> list[tuple[str, str | None]]:
    """Messages of one key for `leave_and_die`."""
    return [(body, key) for body in bodies]


def rows(engine: sa.Engine) -> list[tuple[int, str]]:
    """`relayed` and `shards` of each row, in order."""
    columns = half_message.c
    query = sa.select(columns.relayed, columns.shards).order_by(columns.transaction_id, columns.message_no)
    with engine.connect() as connection:
        return [(int(relayed), str(shards)) for relayed, shards in connection.execute(query)]


def delivered(url: str, topic: str, worker: str = "") -> list[str]:
    """The bodies of a topic's committed messages, in the order of each of its queues; of several workers, those that
    one has."""
    topics = f"/{worker}/v1/topics" if worker else "/v1/topics"
    bodies: list[str] = []
    queue = offset = 0
    while True:
        status, answer = ask(url, "GET", f"{topics}/{topic}/queues/{queue}/messages?offset={offset}&max=1000")
        if status != 200:
            return bodies
        bodies += [message["body"] for message in answer["messages"]]
        queue, offset = (queue, answer["next_offset"]) if answer["messages"] else (queue + 1, 0)
