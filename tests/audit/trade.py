"""A trade to audit, made fact by fact: two services that send, one that consumes with an inbox, and one without.

Each service has a SQLite database, and the log has several segments. Copies of it are harmed by the tests.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client import create_tables
from notify.client.tables.definitions import half_message, notify_inbox, notify_source
from notify.protocol import ids
from notify.protocol.message import body_digest
from notify.protocol.wire import Payload, encode_msgpack
from notify.spark.inputs.databases import Database
from notify.spark.inputs.log_input import LogInput
from notify.spark.result import Inputs
from notify.storage.groups import SettleKind, Subscription
from notify.storage.log.store import LogStore
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.rows import moment_of
from notify.storage.topics import Topic
from tools.bench.made_run import transaction_id

COUNT = 300
STEP_US = 10_000
AGO_US = 120_000_000
"""How long ago it ended: longer than the bounds of the tests' plans."""
SEGMENT_BYTES = 32 << 10
SENDERS = ("shop", "bank")
"""Even transactions are the shop's, odd ones the bank's."""
TOPICS = {"shop": "order.placed", "bank": "payment.made"}
GROUPS = {"shop": "orders", "bank": "payments"}
"""The producer group of each service."""
WITH_INBOX, WITHOUT_INBOX = "points", "mail"
"""Consumer groups: both get orders, and only the first gets payments."""
BODY = b"x" * 200
SERVICES = (*SENDERS, WITH_INBOX)


@dataclass(frozen=True)
class Trade:
    """One trade in a directory."""

    directory: Path
    first_us: int
    number: int = 1
    """Trades of other numbers have other sources and ids."""
    step_us: int = STEP_US
    count: int = COUNT
    at_once: int = 2
    """So many transactions are stored in one batch; an even number."""
    body: bytes = BODY
    ahead_us: int = 0
    """How far the server's clock is ahead of the others."""

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def at(self, n: int) -> int:
        return self.first_us + n * self.step_us

    def id(self, n: int) -> bytes:
        return transaction_id(n + self.count * self.number, self.at(n))

    def name(self, n: int) -> str:
        """The id as text."""
        return ids.to_text(self.id(n))

    def message(self, n: int) -> str:
        return f"{self.name(n)}.0"

    def source(self, service: str) -> str:
        return f"{self.number:08d}-0000-4000-8000-{SERVICES.index(service):012d}"

    def url(self, service: str) -> str:
        return f"sqlite:///{self.directory}/{service}.db"

    def execute(self, service: str, *statements: str) -> None:
        """Change a service's database by SQL."""
        engine = sa.create_engine(self.url(service))
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        engine.dispose()

    def copy(self, to: Path) -> Trade:
        shutil.copytree(self.directory, to)
        return replace(self, directory=to)

    def segments(self) -> list[Path]:
        return sorted(self.log.glob("*.log"))

    def without_index(self) -> None:
        """Remove the derived files, as of a log that was put together by hand."""
        for file in self.log.glob("*.idx"):
            file.unlink()

    @contextmanager
    def inputs(self, services: Sequence[str] = SERVICES, logs: Sequence[Path] = ()) -> Iterator[Inputs]:
        with ExitStack() as stack:
            databases = []
            for service in services:
                database = Database(self.url(service), service)
                stack.callback(database.close)
                databases.append(database)
            yield Inputs(databases, [LogInput(log) for log in logs or (self.log,)])


def service_of(n: int) -> str:
    return SENDERS[n % 2]


def make_trade(
    directory: Path,
    number: int = 1,
    *,
    step_us: int = STEP_US,
    ago_us: int = AGO_US,
    count: int = COUNT,
    at_once: int = 2,
    body: bytes = BODY,
) -> Trade:
    """A sound trade: everything was delivered, settled, and had its effect."""
    directory.mkdir()
    first_us = time.time_ns() // 1000 - count * step_us - ago_us
    trade = Trade(directory, first_us // 1_000_000 * 1_000_000 + number, number, step_us, count, at_once, body)
    write_log(trade)
    for service in SERVICES:
        _write_rows(trade, service)
    return trade


def write_log(trade: Trade) -> None:
    asyncio.run(_write_log(trade))


async def _write_log(trade: Trade) -> None:
    now_us = trade.first_us + trade.ahead_us
    # As many segments, however long the trade.
    segment_bytes = SEGMENT_BYTES * max(1, trade.count // COUNT)
    store = LogStore(trade.log, segment_bytes=segment_bytes, clock=lambda: now_us)
    await store.open(now_us)
    for topic in TOPICS.values():
        await store.create_topic(Topic(topic))
        await store.subscribe(Subscription(WITH_INBOX, topic, inbox_from_us=0), [0])
    await store.subscribe(Subscription(WITHOUT_INBOX, TOPICS["shop"]), [0])
    for n in range(0, trade.count, trade.at_once):
        now_us = trade.at(n) + trade.ahead_us
        made = [half_of(trade, n + i) for i in range(trade.at_once)]
        await store.put(made, now_us)
        await store.decide([(t.id, t.producer_group, State.COMMITTED) for t in made], now_us + 2000)
        for group, topic in ((WITH_INBOX, "shop"), (WITH_INBOX, "bank"), (WITHOUT_INBOX, "shop")):
            runs = [(n // 2, trade.at_once // 2)]
            await store.settle(group, TOPICS[topic], 0, runs, SettleKind.ACK, now_us + 4000)
    await store.sync()
    now_us += AGO_US // 2  # so far the log is complete
    await store.checkpoint()
    await store.close()


def half_of(trade: Trade, n: int) -> NewTransaction:
    service = service_of(n)
    payload = encode_msgpack(Payload(TOPICS[service], trade.body, f"k{n % 7}"))
    return NewTransaction(
        trade.id(n), GROUPS[service], [NewMessage(TOPICS[service], payload, f"k{n % 7}")], trade.source(service), "i"
    )


def row_of(trade: Trade, n: int, **fields: Any) -> dict[str, Any]:
    """The local row of a transaction."""
    service = service_of(n)
    return {
        "transaction_id": trade.name(n), "message_no": 0, "producer_group": GROUPS[service], "mode": "half",
        "state": "COMMITTED", "shards": "", "topic": TOPICS[service], "key": f"k{n % 7}", "relayed": 1,
        "created_at": moment_of(trade.at(n) + 20), "digest": body_digest(trade.body),
    } | fields  # fmt: skip


def effect_of(trade: Trade, n: int, **fields: Any) -> dict[str, Any]:
    """The inbox row of a transaction's message."""
    at = moment_of(trade.at(n) + 3000)
    return {"consumer_group": WITH_INBOX, "message_id": trade.message(n), "created_at": at} | fields


def _write_rows(trade: Trade, service: str) -> None:
    engine = sa.create_engine(trade.url(service))
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(notify_source.update().values(id=trade.source(service)))
        rows = [row_of(trade, n) for n in range(trade.count) if service_of(n) == service]
        if rows:
            connection.execute(half_message.insert(), rows)
        if service == WITH_INBOX:
            connection.execute(notify_inbox.insert(), [effect_of(trade, n) for n in range(trade.count)])
    engine.dispose()
