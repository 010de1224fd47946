"""Compares handlers of batches with handlers of single messages, with an inbox on PostgreSQL.

Run as `python -m notify.bench.batches`; prints one JSON object with the messages a second of each kind. Server,
database and consumer share the machine. Each handler inserts one row for each message. The database is durable (fsync).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.bench.requests import call, subscribe
from notify.client import Consumer, Inbox, ReceivedMessage, create_tables
from notify.ending import exiting_when_told
from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess

TOPIC = "bench"
CONCURRENCY = 16
BODY = "x" * 256
MESSAGES_A_REQUEST = 1000
LONGEST_SECONDS = 600.0
effects = sa.Table("effects", sa.MetaData(), sa.Column("message_id", sa.String(64), nullable=False))


def handled(url: str, engine: sa.Engine, group: str, messages: int, batch: int | None) -> float:
    """Handle a backlog of this many messages with a new group. Returns messages a second."""
    consumer = Consumer(url, group=group, inbox=Inbox(engine), concurrency=CONCURRENCY)
    times: list[float] = []
    counts: list[int] = []

    def note(count: int) -> None:
        times.append(time.perf_counter())
        counts.append(count)
        if sum(counts) >= messages:
            consumer.stop()

    if batch is None:

        @consumer.subscribe(TOPIC, start="earliest")
        def handle(message: ReceivedMessage, session: Session) -> None:
            session.execute(sa.insert(effects), {"message_id": message.id})
            note(1)

    else:

        @consumer.subscribe(TOPIC, start="earliest", batch=batch)
        def handle_all(received: list[ReceivedMessage], session: Session) -> None:
            session.execute(sa.insert(effects), [{"message_id": message.id} for message in received])
            note(len(received))

    guard = threading.Timer(LONGEST_SECONDS, consumer.stop)
    guard.start()
    began = time.perf_counter()
    consumer.run(signals=False)
    guard.cancel()
    assert sum(counts) == messages, f"{sum(counts)} of {messages} messages were handled"
    return messages / (max(times) - began)


def run(messages: int, batch: int) -> dict[str, Any]:
    """Run both kinds of handlers once, single messages first. Returns both rates and their ratio."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        engine = sa.create_engine(stack.enter_context(postgresql()), pool_size=CONCURRENCY)
        stack.callback(engine.dispose)
        create_tables(engine)
        effects.create(engine)
        for group in ("singles", "batches"):
            subscribe(server.url, group, TOPIC)
        request = {"messages": [{"topic": TOPIC, "body": BODY}] * MESSAGES_A_REQUEST}
        for _ in range(0, messages, MESSAGES_A_REQUEST):
            call(server.url, "POST", "/v1/messages", request)
        singles = handled(server.url, engine, "singles", messages, None)
        batches = handled(server.url, engine, "batches", messages, batch)
        with engine.connect() as connection:
            rows = connection.scalar(sa.select(sa.func.count()).select_from(effects))
        assert rows == 2 * messages, f"{rows} effects of {2 * messages}"
    return {
        "messages": messages,
        "batch": batch,
        "singles_per_second": round(singles),
        "batches_per_second": round(batches),
        "ratio": round(batches / singles, 1),
    }


def main() -> None:
    """Measure once with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000, help="a multiple of 1,000")
    parser.add_argument("--batch", type=int, default=500)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.messages, arguments.batch)))


if __name__ == "__main__":
    with exiting_when_told():
        main()
