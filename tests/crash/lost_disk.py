"""A shop over a server whose disk is lost: producers, two groups with inboxes, and a reader with offsets of its own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from notify.client import Consumer, Inbox, Message, Reader, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message
from notify.errors import NotifyError
from notify.protocol.message import ReceivedMessage
from tests.support.background import repeated
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import running
from tests.support.shop import make_engine

TOPIC = "order.placed"
GROUPS = {"points": "shared", "ledger": "ordered"}
KEYS = 7
PAD = ""


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Effect(Base):
    """The work of a group for an order; nothing but its inbox keeps it from doing that twice."""

    __tablename__ = "effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    consumer_group: Mapped[str] = mapped_column(sa.String(50))
    number: Mapped[int]


class Copied(Base):
    """A message as the reader has copied it, by its offset."""

    __tablename__ = "copied"
    queue: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    message_id: Mapped[str] = mapped_column(sa.String(64))


class LostDiskShop:
    """Tables in a new database, and everyone who uses the server at `server_url`. Close it at the end."""

    def __init__(self, database_url: str, server_url: str) -> None:
        self.url = database_url
        self.server_url = server_url
        self.engine = make_engine(database_url)
        create_tables(self.engine)
        Base.metadata.create_all(self.engine)
        self.producer = TransactionProducer(server_url, group="orders", engine=self.engine, keep_messages=True)
        self.consumers = [self._consumer(group, mode) for group, mode in GROUPS.items()]
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)

    def _consumer(self, group: str, mode: str) -> Consumer:
        consumer = Consumer(self.server_url, group=group, inbox=Inbox(self.engine), lease=5)

        def handle(message: ReceivedMessage, session: Session) -> None:
            session.add(Effect(consumer_group=group, number=message.json()["n"]))

        consumer.subscribe(TOPIC, mode=mode, start="earliest")(handle)
        return consumer

    # --- load -------------------------------------------------------------------------------------------------

    @contextmanager
    def consuming(self) -> Iterator[None]:
        """Consume and copy in the background, whatever becomes of the server."""
        stop = threading.Event()
        copying = threading.Thread(target=self._copy, args=(stop,), daemon=True)
        with running(*self.consumers):
            copying.start()
            try:
                yield
            finally:
                stop.set()
                copying.join(PATIENCE_SECONDS)

    @contextmanager
    def ordering(self, threads: int = 3) -> Iterator[None]:
        """Place orders in the background; one that fails, because the server is unreachable, did not happen."""
        passing = (NotifyError, sa.exc.DBAPIError)
        with repeated(self.order, threads=threads, pause_seconds=0.005, passing=passing):
            yield

    def order(self) -> None:
        n = next(self._numbers)
        with Session(self.engine) as session, session.begin():
            session.add(Order(id=n))
            self.producer.send(session, Message(TOPIC, {"n": n, "pad": PAD}, key=str(n % KEYS)))

    def _copy(self, stop: threading.Event) -> None:
        """Copy the queue into a table by offset, on from where that ends."""
        reader = Reader(self.server_url)
        try:
            while not stop.wait(0.05):
                last = self.copied_to()
                try:
                    found = [Copied(queue=0, position=m.offset, message_id=m.id) for m in reader.read(
                        TOPIC, offset=last + 1)]  # fmt: skip
                except NotifyError:
                    continue  # the server is unreachable, or has no such topic yet
                with Session(self.engine) as session, session.begin():
                    session.add_all(found)
        except Exception as error:
            self.complaints.append(f"the reader failed: {error!r}")
        finally:
            reader.close()

    def copied_to(self) -> int:
        """The last offset that the reader has copied, -1 for none."""
        with self.engine.connect() as connection:
            last = connection.execute(sa.select(sa.func.max(Copied.position))).scalar()
        return -1 if last is None else int(last)

    # --- what became of it ------------------------------------------------------------------------------------

    def committed(self) -> set[str]:
        """The ids of the messages of committed transactions."""
        t = half_message.c
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(t.transaction_id, t.message_no).where(t.state == "COMMITTED")).all()
        return {f"{row[0]}.{row[1]}" for row in rows}

    def queued(self) -> dict[str, int]:
        """The message ids that are in the queue, and the offset of each; an id that is there twice is a complaint."""
        found: dict[str, int] = {}
        reader = Reader(self.server_url)
        try:
            for m in reader.read(TOPIC):
                if m.id in found:
                    self.complaints.append(f"{m.id} is in the queue twice, at {found[m.id]} and {m.offset}")
                found[m.id] = m.offset
        finally:
            reader.close()
        return found

    def effects(self) -> dict[tuple[str, int], int]:
        """How often each group did its work for each order."""
        e = sa.select(Effect.consumer_group, Effect.number, sa.func.count()).group_by(
            Effect.consumer_group, Effect.number
        )
        with self.engine.connect() as connection:
            return {(str(row[0]), int(row[1])): int(row[2]) for row in connection.execute(e).all()}

    def wrong_effects(self) -> list[str]:
        """Complaints about orders for which a group did its work other than once."""
        with self.engine.connect() as connection:
            orders = [int(row[0]) for row in connection.execute(sa.select(Order.id)).all()]
        effects = self.effects()
        wanted = {(group, number) for group in GROUPS for number in orders}
        wrong = [f"group {key[0]} did its work for order {key[1]} {effects.get(key, 0)} times" for key in sorted(
            wanted | effects.keys()) if effects.get(key, 0) != (1 if key in wanted else 0)]  # fmt: skip
        return wrong

    def wrongly_copied(self, queued: dict[str, int]) -> list[str]:
        """Complaints about messages of the queue that the reader missed, or has under another offset's message."""
        with self.engine.connect() as connection:
            copied = {int(row[0]): str(row[1]) for row in connection.execute(
                sa.select(Copied.position, Copied.message_id)).all()}  # fmt: skip
        return [
            f"the reader has {copied.get(offset, 'nothing')} at offset {offset}, the queue {message_id}"
            for message_id, offset in queued.items()
            if copied.get(offset) != message_id
        ]

    def close(self) -> None:
        self.producer.close()
        self.engine.dispose()


class Failing:
    """A store in a directory that is unreachable now and then. Its path is a link, which then leads nowhere."""

    def __init__(self, place: Path, chance: Random) -> None:
        self._there = place / "objects"
        self._link = place / "bucket"
        self._chance = chance
        self._there.mkdir(parents=True)
        self._lead(self._there)
        self.url = f"file://{self._link}/log"
        self.times = 0

    def _lead(self, target: Path) -> None:
        new = self._link.with_name("bucket.new")
        new.symlink_to(target)
        os.replace(new, self._link)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Have it go away for moments, in the background."""
        stop = threading.Event()

        def fail() -> None:
            while not stop.wait(self._chance.uniform(0.2, 1.0)):
                self._lead(Path("/dev/null/away"))
                self.times += 1
                stop.wait(self._chance.uniform(0.05, 0.6))
                self._lead(self._there)

        thread = threading.Thread(target=fail, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(PATIENCE_SECONDS)
