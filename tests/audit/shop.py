"""A shop to audit: orders with messages, and a consumer with an inbox, on one server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message, notify_inbox
from notify.errors import NotifyError
from notify.protocol import ids
from tests.support.background import repeated
from tests.support.groups import running
from tests.support.shop import Base, Order, make_engine

TOPIC = "order.placed"


class Shop:
    """Tables in an empty database, a producer and a consumer. Close it at the end."""

    def __init__(self, database_url: str, server_url: str, kafka_url: str = "") -> None:
        """`kafka_url`: consume from Kafka; the producer then writes an outbox, which the caller relays."""
        self.url = database_url
        self.engine = make_engine(database_url)
        create_tables(self.engine)
        Base.metadata.create_all(self.engine)
        self.producer = TransactionProducer(
            server_url, group="orders", engine=self.engine, mode="outbox" if kafka_url else "half"
        )
        self.consumer = Consumer(kafka_url or server_url, group="points", inbox=Inbox(self.engine))
        self.consumer.subscribe(TOPIC, start="earliest")(lambda message, session: None)
        self._numbers = itertools.count()

    def order(self) -> None:
        """Place an order."""
        n = next(self._numbers)
        with Session(self.engine) as session, session.begin():
            session.add(Order(item="tea"))
            self.producer.send(session, Message(TOPIC, {"n": n}, key=str(n % 7)))

    def transactions(self) -> set[str]:
        """The committed transactions."""
        with self.engine.connect() as connection:
            return {str(row[0]) for row in connection.execute(sa.select(half_message.c.transaction_id))}

    def row(self, transaction_id: str, **fields: Any) -> dict[str, Any]:
        """Insert a local row as a committed transaction does, with the database's time (PostgreSQL)."""
        return {
            "transaction_id": transaction_id, "message_no": 0, "producer_group": "orders", "mode": "half",
            "state": "COMMITTED", "shards": "", "topic": TOPIC, "relayed": 1,
            "created_at": sa.text("clock_timestamp() AT TIME ZONE 'utc'"),
        } | fields  # fmt: skip

    def lose(self) -> str:
        """Lose a message: its transaction committed, and no server has it. Returns the message's id."""
        name = ids.to_text(ids.new_id())
        with self.engine.begin() as connection:
            connection.execute(half_message.insert().values(self.row(name)))
        return f"{name}.0"

    def effects(self) -> set[str]:
        """The transactions whose message took effect."""
        with self.engine.connect() as connection:
            return {str(row[0]).partition(".")[0] for row in connection.execute(sa.select(notify_inbox.c.message_id))}

    @contextmanager
    def busy(self, threads: int = 1, pause_seconds: float = 0.0) -> Iterator[None]:
        """Place and consume orders in the background until the context ends."""
        # Where the server is unreachable, an order does not happen.
        ordering = repeated(self.order, threads=threads, pause_seconds=pause_seconds, passing=(NotifyError,))
        with running(self.consumer), ordering:
            yield

    def close(self) -> None:
        self.producer.close()
        self.engine.dispose()
