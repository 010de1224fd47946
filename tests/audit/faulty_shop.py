"""A shop in which something goes wrong now and then: each fault is one finding of an audit, and of no other class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Consumer, Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message, notify_inbox
from notify.protocol import ids
from notify.runtime.databases import database_now
from tests.audit.shop import Shop
from tests.support.clock import eventually
from tests.support.groups import running
from tests.support.shop import Order, make_engine

GHOST, ALTERED, CONFLICT, LAZY, SLOW = "order.ghost", "order.altered", "order.conflict", "order.lazy", "order.slow"
SLEEPERS = "sleepers"
"""A group that subscribed to SLOW, and does nothing."""


@dataclass(frozen=True)
class Fault:
    """A planted fault: the class of its finding, and what the finding's key has in it."""

    finding: str
    subject: str

    def is_in(self, key: str) -> bool:
        return key.startswith(f"{self.finding}:") and self.subject in key


class FaultyShop:
    """Plants faults in a busy shop on PostgreSQL."""

    def __init__(self, shop: Shop, server_url: str) -> None:
        self._shop = shop
        self._server_url = server_url
        self.planted: list[Fault] = []
        for topic in (GHOST, ALTERED, CONFLICT, LAZY, SLOW):
            shop.consumer.subscribe(topic, start="earliest")(lambda message, session: None)
        self._ways: list[Callable[[], Fault]] = [
            self._lose, self._ghost, self._alter, self._conflict, self._forget, self._orphan, self._garble, self._leave,
        ]  # fmt: skip

    def open(self) -> None:
        """Subscribe the group that does nothing."""
        sleeper = Consumer(self._server_url, group=SLEEPERS)
        sleeper.subscribe(SLOW, start="earliest")(lambda message: None)
        with running(sleeper, subscribed=True):
            pass

    def plant(self) -> Fault:
        """Plant the next fault; all classes have their turn."""
        fault = self._ways[len(self.planted) % len(self._ways)]()
        self.planted.append(fault)
        return fault

    def _placed(self, topic: str) -> str:
        """Place an order; its transaction's id."""
        t = half_message.c
        newest = sa.select(t.transaction_id).where(t.topic == topic).order_by(t.transaction_id.desc()).limit(1)
        with Session(self._shop.engine) as session, session.begin():
            session.add(Order(item="tea"))
            self._shop.producer.send(session, Message(topic, {"n": 0}, key="1"))
        with self._shop.engine.connect() as connection:
            return str(connection.execute(newest).scalar_one())

    def _change(self, statement: sa.Update | sa.Delete | sa.Insert) -> int:
        with self._shop.engine.begin() as connection:
            return connection.execute(statement).rowcount

    def _lose(self) -> Fault:
        return Fault("LOST", self._shop.lose())

    def _ghost(self) -> Fault:
        name = self._placed(GHOST)
        self._change(half_message.delete().where(half_message.c.transaction_id == name))
        return Fault("GHOST", name)

    def _alter(self) -> Fault:
        name = self._placed(ALTERED)
        row = half_message.update().where(half_message.c.transaction_id == name)
        self._change(row.values(topic="order.of-somebody"))
        return Fault("ALTERED", name)

    def _conflict(self) -> Fault:
        name = self._placed(CONFLICT)
        row = half_message.update().where(half_message.c.transaction_id == name)
        self._change(row.values(state="ROLLED_BACK", topic=""))
        return Fault("CONFLICT", name)

    def _forget(self) -> Fault:
        """An effect that is gone, though its message was acknowledged."""
        name = self._placed(LAZY)
        row = notify_inbox.delete().where(notify_inbox.c.message_id == f"{name}.0")
        eventually(lambda: self._change(row), "the effect")
        return Fault("ACKED_NO_EFFECT", name)

    def _orphan(self) -> Fault:
        name = ids.to_text(ids.new_id())
        row = {"consumer_group": "points", "message_id": f"{name}.0", "created_at": database_now()}
        self._change(notify_inbox.insert().values(**row))
        return Fault("ORPHAN_ROW", name)

    def _garble(self) -> Fault:
        name = f"no id {len(self.planted)}!"
        self._change(half_message.insert().values(self._shop.row(name)))
        return Fault("MALFORMED", name)

    def _leave(self) -> Fault:
        return Fault("UNDELIVERED", f"{self._placed(SLOW)}.0:{SLEEPERS}")


class Bank:
    """A second service, whose local rows can be unreachable for a while: then nothing can be said of its messages."""

    def __init__(self, database_url: str, server_url: str) -> None:
        self._engine = make_engine(database_url)
        create_tables(self._engine)
        self._producer = TransactionProducer(server_url, group="payments", engine=self._engine)

    def pay(self, count: int = 3) -> None:
        for n in range(count):
            with Session(self._engine) as session, session.begin():
                self._producer.send(session, Message("payment.made", {"n": n}))

    def hide_rows(self) -> None:
        self._rename(half_message.name, "hidden")

    def show_rows(self) -> None:
        self._rename("hidden", half_message.name)

    def _rename(self, old: str, new: str) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    def close(self) -> None:
        self._producer.close()
        self._engine.dispose()
