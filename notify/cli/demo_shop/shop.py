"""The shop's tables and its two kinds of processes: a producer places orders, a consumer gives points for them.

Run as `python -m notify.cli.demo_shop.shop orders|points SPEC`. SPEC is JSON with url, dsn, the name of the process
and, for orders, the files that it shares with the conductor, see `place_orders`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from notify.cli.demo_shop.end import End, SelfKill
from notify.client import (
    Consumer,
    Inbox,
    Message,
    ReceivedMessage,
    TransactionProducer,
    create_tables,
    use_explicit_begin,
)
from notify.errors import NotifyError

TOPIC = "order.placed"
GROUP = "points"
CALLERS = 4
HALF_SECONDS = 5.0
"""How long an order waits for the server: long enough on a slow machine, short enough if the server was killed."""


class Base(DeclarativeBase):
    pass


class ShopOrder(Base):
    """An order exists if and only if its transaction committed."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str] = mapped_column(sa.String(36), unique=True)
    item: Mapped[str] = mapped_column(sa.String(40))
    process: Mapped[str] = mapped_column(sa.String(40))
    """The life of the producer that committed the order; the conductor kills only processes that made progress."""


class Points(Base):
    """An effect. Only the inbox prevents a second row for an order."""

    __tablename__ = "points"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_number: Mapped[str] = mapped_column(sa.String(36), index=True)
    amount: Mapped[int]
    message_id: Mapped[str] = mapped_column(sa.String(64))
    process: Mapped[str] = mapped_column(sa.String(40))


def open_engine(dsn: str) -> sa.Engine:
    """An engine for the shop. With SQLite it waits for the lock and syncs each commit."""
    if dsn.startswith("sqlite"):
        engine = sa.create_engine(dsn, connect_args={"timeout": 30})
        use_explicit_begin(engine)
        sa.event.listen(engine, "connect", _sync_each_commit)
        return engine
    return sa.create_engine(dsn)


def _sync_each_commit(connection: Any, record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def make_tables(dsn: str) -> None:
    engine = open_engine(dsn)
    Base.metadata.create_all(engine)
    create_tables(engine)
    engine.dispose()


class ChangedMind(Exception):
    """The customer leaves after the message was sent, and the order is rolled back."""


def place_orders(spec: dict[str, Any]) -> None:
    """Place orders from several threads until the file `stop` exists; then make the file `stopped`.

    Each attempt first writes a line into the file `attempts`. `end` says whether and where this process kills itself;
    before that it writes the transaction into the file `lost`.
    """
    engine = open_engine(spec["dsn"])
    producer = TransactionProducer(spec["url"], group="shop", engine=engine, half_timeout=HALF_SECONDS)
    stop = Path(spec["stop"])
    attempts = os.open(spec["attempts"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    self_kill = SelfKill(End(**spec["end"]), spec["process"], Path(spec["lost"])) if spec.get("end") else None

    @producer.transactional(sessionmaker(engine))
    def place_order(session: Session, number: str, item: str) -> None:
        order = ShopOrder(number=number, item=item, process=spec["process"])
        session.add(order)
        message = Message(TOPIC, {"number": number, "points": len(item)}, key=lambda: order.id)
        producer.send(session, message)
        if random.random() < 0.2:
            session.flush()
            raise ChangedMind

    def customer() -> None:
        while not stop.exists():
            number = str(uuid.uuid4())
            os.write(attempts, number.encode() + b"\n")
            try:
                place_order(number, random.choice(("tea", "rice", "salt", "soap")))
                if self_kill is not None:
                    self_kill.committed()
            except ChangedMind:
                continue
            except (NotifyError, sa.exc.SQLAlchemyError) as error:
                # The server or the database cannot be reached, and this order was not placed.
                print(f"no order: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                time.sleep(0.05)
            time.sleep(spec["pause"])

    customers = [threading.Thread(target=customer) for _ in range(CALLERS)]
    for thread in customers:
        thread.start()
    for thread in customers:
        thread.join()
    Path(spec["stopped"]).touch()
    # The process keeps running and answers checks until SIGTERM.
    signal.sigwait([signal.SIGTERM])
    producer.close()


def give_points(spec: dict[str, Any]) -> None:
    """Give points for each order, exactly once, until SIGTERM."""
    engine = open_engine(spec["dsn"])
    consumer = Consumer(spec["url"], group=GROUP, inbox=Inbox(engine), concurrency=4, lease=3)

    @consumer.subscribe(TOPIC, start="earliest")
    def on_placed(message: ReceivedMessage, session: Session) -> None:
        order = message.json()
        session.add(
            Points(
                order_number=order["number"],
                amount=order["points"],
                message_id=message.id,
                process=spec["process"],
            )
        )

    consumer.run()
    engine.dispose()


def main() -> None:
    role, spec = sys.argv[1], json.loads(sys.argv[2])
    (place_orders if role == "orders" else give_points)(spec)


if __name__ == "__main__":
    main()
