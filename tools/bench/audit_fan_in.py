"""`make bench-audit-fan-in MESSAGES=…`: measures audits of 3 logs, 3 databases, 200 consumer groups and 10,000 topics.

Each log has every topic. Each service writes to one log, and its database has the inboxes of its consumers. Two sizes
are audited with the same heap, to show whether memory grows with the number of messages.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.client.tables.creation import create_tables
from notify.client.tables.definitions import notify_source
from notify.protocol import ids
from notify.protocol.message import body_digest
from notify.protocol.wire import Payload, encode_msgpack
from notify.runtime.signals import exit_on_signal
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.rows import text_of
from notify.storage.topics import Topic
from notify.testing.databases import SERVERS
from tools.bench.made_run import (
    EFFECTIVE_AFTER_US,
    INBOX_COLUMNS,
    LOCAL_COLUMNS,
    Made,
    load_rows,
    local_row,
    open_engine,
    started_us,
    transaction_id,
)
from tools.bench.measured_audit import measured_audit
from tools.bench.sql import fresh

SERVICES, TOPICS, GROUPS = 3, 10_000, 200
BODY = bytes(100)
COMMITTED_AFTER_US = 5_000
STEP_US = 1_000
"""The time between two transactions of a service: 1,000 transactions a second."""
BATCH = 500


@dataclass(frozen=True)
class Service:
    """A service, which writes messages to its own log, to each topic in turn."""

    number: int
    made: Made

    @property
    def source(self) -> str:
        """The id of the service's database."""
        return f"00000000-0000-4000-8000-{self.number + 1:012}"

    @property
    def producers(self) -> str:
        return f"orders-{self.number}"

    def id(self, n: int) -> bytes:
        """The id of the service's nth transaction; other services have other ids."""
        return transaction_id(n * SERVICES + self.number, self.made.at(n))

    def local_rows(self) -> Iterator[list[Any]]:
        digest = body_digest(BODY)
        for n in range(self.made.count):
            yield local_row(ids.to_text(self.id(n)), topic_of(n), self.made.at(n) + 20, digest, self.producers)

    def inbox_rows(self, database: int) -> Iterator[list[Any]]:
        """The effects of the service's messages in a database, by the number of the database."""
        for n in range(self.made.count):
            if n % TOPICS % GROUPS % SERVICES == database:
                created_at = text_of(self.made.at(n + BATCH) + EFFECTIVE_AFTER_US)
                yield [group_of(n), f"{ids.to_text(self.id(n))}.0", created_at]


def topic_of(n: int) -> str:
    return f"topic-{n % TOPICS:05}"


def group_of(n: int) -> str:
    """The group that reads the topic of the nth message."""
    return f"group-{n % TOPICS % GROUPS:03}"


async def write_log(service: Service) -> None:
    made = service.made
    store = LogStore(made.log, segment_bytes=64 << 20)
    await store.open(made.first_us)
    await asyncio.gather(*[store.create_topic(Topic(topic_of(n))) for n in range(TOPICS)])
    for n in range(TOPICS):
        store.subscribe_soon(Subscription(group_of(n), topic_of(n), mode="shared", inbox_from_us=0), [0])
    await store.sync()
    for first in range(0, made.count, BATCH):
        numbers = range(first, min(made.count, first + BATCH))
        now = made.at(numbers.stop)
        halves = [
            NewTransaction(
                service.id(n), service.producers, [NewMessage(topic_of(n), _payload(topic_of(n)), "")], service.source
            )
            for n in numbers
        ]
        await store.put(halves, now)
        outcomes = [(half.id, service.producers, State.COMMITTED) for half in halves]
        await store.decide(outcomes, now + COMMITTED_AFTER_US)
        for n in numbers:
            store.settle_soon(group_of(n), topic_of(n), 0, [(n // TOPICS, 1)], SettleKind.ACK)
    await store.sync()
    await store.close()


def _payload(topic: str) -> bytes:
    return encode_msgpack(Payload(topic, BODY))


def load(services: list[Service], urls: list[str], scratch: Path) -> None:
    """Load each service's local rows and inbox rows into its database."""
    for service, url in zip(services, urls, strict=True):
        engine = open_engine(url)
        create_tables(engine)
        with engine.begin() as connection:
            connection.execute(notify_source.update().values(id=service.source))
        load_rows(engine, "half_message", LOCAL_COLUMNS, service.local_rows(), scratch)
        effects = itertools.chain.from_iterable(each.inbox_rows(service.number) for each in services)
        load_rows(engine, "notify_inbox", INBOX_COLUMNS, effects, scratch)
        engine.dispose()


def of_size(messages: int, memory: str, directory: Path) -> dict[str, Any]:
    """Make a run of this many messages in an empty directory, audit it, and return the figures."""
    count = messages // SERVICES
    first_us = started_us(count + BATCH, STEP_US)
    # The audit would take logs that began at the same microsecond for copies of one log.
    services = [Service(n, Made(directory / f"log{n}", count, first_us + n, STEP_US)) for n in range(SERVICES)]
    for service in services:
        asyncio.run(write_log(service))
    with SERVERS["postgresql"](durable=False) as url:
        urls = [fresh(url) for _ in services]
        load(services, urls, directory)
        databases = {f"service{n}": service_url for n, service_url in enumerate(urls)}
        logs = [service.made.log for service in services]
        return measured_audit(databases, logs, directory / "report", ["--memory", memory])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=1_000_000, help="of the smaller run; the other has 4 times as many"
    )
    parser.add_argument("--memory", default="1g", help="the heap of the JVM")
    arguments = parser.parse_args()
    for messages in (arguments.messages, 4 * arguments.messages):
        directory = Path(tempfile.mkdtemp(prefix="notify-fan-in-"))
        directory.chmod(0o755)
        try:
            figures = of_size(messages, arguments.memory, directory)
            print(json.dumps({"memory": arguments.memory} | figures), flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    with exit_on_signal():
        main()
