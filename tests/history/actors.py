"""The processes of a history: `python -m tests.history.actors produce|consume SPEC`, SPEC being JSON.

Each may be killed at any moment. A producer notes each intent before it begins, and the answer after it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from notify.client import (
    AsyncConsumer,
    AsyncTransactionProducer,
    Consumer,
    Inbox,
    Message,
    ReceivedMessage,
    TransactionProducer,
)
from notify.errors import NotifyError
from tests.history.messages import TOPIC, messages, rows, topic_of
from tests.history.misbehaviour import Misbehaviour
from tests.history.tables import EffectRow, Intent, Notes, open_engine

KEYS = 12
"""The number of keys of each caller."""
MESSAGES_AT_ONCE = 16
OUTBOX_CALLER = 3
"""The caller that sends in outbox mode alone: a bridge or relay keeps the order in which it committed its messages."""
HALF_SECONDS = 3.0
MAX_ATTEMPTS = 6
MAX_ATTEMPTS_OF_BROADCAST = 1000
"""Dead letters of a broadcast cannot be sent again: a database that was unreachable for six attempts cost its
messages."""
RETRIES = {"retry_min": 0.2, "retry_max": 2.0}


class ChangedMind(Exception):
    """The caller rolls back after it has sent its message."""


class Caller:
    """One caller, whose intents use the ways to send in turn."""

    def __init__(self, spec: dict[str, Any], number: int, notes: Notes) -> None:
        self._stop, self._hold = Path(spec["stop"]), Path(spec["hold"])
        self._notes = notes
        self._name = f"{spec['source']}{number}"
        self.pause = float(spec["pause"])
        self.chance = random.Random()

    def begin(self) -> tuple[str, str]:
        """Begin an intent; return its number and key."""
        number, key = str(uuid.uuid4()), f"{self._name}-{self.chance.randrange(KEYS)}"
        self._notes.add("intent", number)
        return number, key

    def told(self, number: str, answer: str) -> None:
        """Note the caller's answer for an intent."""
        self._notes.add("told", number, answer)

    def attempt(self, send: Callable[[str, str], None]) -> None:
        """Carry out one intent with `send(number, key)`, and note its result."""
        number, key = self.begin()
        try:
            send(number, key)
        except ChangedMind:
            self.told(number, "rolled back")
        except NotifyError:
            self.told(number, "refused")
            time.sleep(0.05)  # the pause of a caller that was refused
        except sa.exc.SQLAlchemyError:
            # The database is unreachable, and the outcome is unknown.
            time.sleep(0.2)  # the pause of a caller whose database is unreachable
        else:
            self.told(number, "committed")

    def go_on(self, send: Callable[[str, str], None]) -> None:
        """Carry out intents until the history ends."""
        while not self.is_over:
            if self.is_held:
                time.sleep(0.2)  # the pause between two polls
            else:
                self.attempt(send)
                time.sleep(self.pause)  # the pace of a short history

    @property
    def is_over(self) -> bool:
        return self._stop.exists()

    @property
    def is_held(self) -> bool:
        """Whether callers must wait until consumers catch up."""
        return self._hold.exists()


def produce(spec: dict[str, Any]) -> None:
    """Produce by decorator, session, Core connection and outbox, each in a thread of its own."""
    engine = open_engine(spec["dsn"])
    notes = Notes(Path(spec["notes"]))
    most_delay = spec["most_delay"]
    options: dict[str, Any] = {"half_timeout": HALF_SECONDS}
    producer = TransactionProducer(spec["url"], group=spec["source"], engine=engine, **options)
    outbox_engine = open_engine(spec["dsn"])
    outbox = TransactionProducer(spec["url"], group=spec["source"], engine=outbox_engine, mode="outbox", **options)
    sessions, outbox_sessions = sessionmaker(engine), sessionmaker(outbox_engine)

    def decorated(caller: Caller) -> Callable[[str, str], None]:
        @producer.transactional(sessions)
        def send(session: Session, number: str, key: str) -> None:
            session.add_all(rows(number, key, MESSAGES_AT_ONCE))
            for message in messages(number, key, most_delay, MESSAGES_AT_ONCE):
                producer.send(session, message)
            if caller.chance.random() < 0.15:
                session.flush()
                raise ChangedMind

        return send

    def by_session(caller: Caller) -> Callable[[str, str], None]:
        def send(number: str, key: str) -> None:
            with sessions() as session, producer.transaction(session) as transaction:
                session.add_all(rows(number, key))
                with session.begin_nested() as savepoint:
                    transaction.send(Message(TOPIC, {"number": "never", "key": key}, key=key))
                    savepoint.rollback()
                transaction.send(messages(number, key, most_delay)[0])
                if caller.chance.random() < 0.15:
                    raise ChangedMind

        return send

    def by_core(caller: Caller) -> Callable[[str, str], None]:
        def send(number: str, key: str) -> None:
            with engine.connect() as connection, producer.transaction(connection) as transaction:
                row = {"number": f"{number}.0", "key": key, "topic": topic_of(f"{number}.0")}
                connection.execute(sa.insert(Intent), row)
                transaction.send(messages(number, key, most_delay)[0])
                if caller.chance.random() < 0.15:
                    raise ChangedMind

        return send

    def by_outbox(caller: Caller) -> Callable[[str, str], None]:
        def send(number: str, key: str) -> None:
            with outbox_sessions() as session, session.begin():
                session.add_all(rows(number, key))
                outbox.send(session, messages(number, key, most_delay)[0])
                if caller.chance.random() < 0.15:
                    raise ChangedMind
            time.sleep(0.02)  # the pace of the outbox: a relay or bridge moves it one step later

        return send

    ways = [decorated, by_session, by_core, by_outbox, decorated]
    assert ways[OUTBOX_CALLER] is by_outbox
    threads = []
    for place, way in enumerate(ways[: spec["callers"]]):
        caller = Caller(spec, place, notes)

        threads.append(threading.Thread(target=caller.go_on, args=(way(caller),)))
    if spec.get("async_dsn"):
        threads.append(threading.Thread(target=lambda: asyncio.run(_produce_async(spec, notes))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while not Path(spec["end"]).exists():
        time.sleep(0.1)  # the pause between two polls: checks are answered until everything is settled
    producer.close()
    outbox.close()


async def _produce_async(spec: dict[str, Any], notes: Notes) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(spec["async_dsn"], pool_pre_ping=True)
    most_delay = spec["most_delay"]
    caller = Caller(spec, 99, notes)
    async with AsyncTransactionProducer(
        spec["url"], group=spec["source"], engine=engine, half_timeout=HALF_SECONDS
    ) as producer:
        while not caller.is_over:
            if caller.is_held:
                await asyncio.sleep(0.2)  # the pause between two polls
                continue
            number, key = caller.begin()
            try:
                async with AsyncSession(engine) as session, session.begin():
                    session.add_all(rows(number, key))
                    await producer.send(session, messages(number, key, most_delay)[0])
                    if caller.chance.random() < 0.15:
                        raise ChangedMind
            except ChangedMind:
                caller.told(number, "rolled back")
            except NotifyError:
                caller.told(number, "refused")
                await asyncio.sleep(0.05)  # the pause of a caller that was refused
            except sa.exc.SQLAlchemyError:
                await asyncio.sleep(0.2)  # the pause of a caller whose database is unreachable
            else:
                caller.told(number, "committed")
            await asyncio.sleep(caller.pause)  # the pace of a short history
    await engine.dispose()


def _row(who: str, message: ReceivedMessage) -> EffectRow:
    body = message.json()
    return EffectRow(
        who=who,
        number=body["number"],
        key=body["key"],
        queue=message.queue,
        offset=message.offset,
        committed_at=message.committed_at,
    )


def _subscription(spec: dict[str, Any]) -> dict[str, Any]:
    tags = [spec["tag"]] if spec["tag"] else []
    most = MAX_ATTEMPTS if spec["mode"] != "broadcast" else MAX_ATTEMPTS_OF_BROADCAST
    return {
        "mode": spec["mode"], "tags": tags, "filter": spec["filter"], "start": "earliest",
        "max_attempts": most, "max_deaths": most, "batch": spec["batch"],
    } | RETRIES  # fmt: skip


def consume(spec: dict[str, Any]) -> None:
    """Consume with an inbox, in one group and mode."""
    engine = open_engine(spec["dsn"])
    misbehaviour = Misbehaviour(Path(spec["notes"]), spec["group"], MAX_ATTEMPTS)
    options = {"group": spec["group"], "instance": spec["instance"], "lease": 3.0, "concurrency": 8}
    if spec.get("async_dsn"):
        asyncio.run(_consume_async(spec, misbehaviour, options))
        return

    def take(message: ReceivedMessage, session: Session) -> None:
        time.sleep(misbehaviour.before(message))  # a slow handler
        session.add(_row(spec["who"], message))

    def take_all(messages: list[ReceivedMessage], session: Session) -> None:
        for message in messages:
            take(message, session)

    while True:
        consumer = Consumer(spec["url"], inbox=Inbox(engine), **options)
        consumer.subscribe(spec["topic"], **_subscription(spec))(take if spec["batch"] is None else take_all)
        try:
            consumer.run()
            return
        except NotifyError as refusal:  # the group has another mode now, or another instance owns the topic
            print(refusal, file=sys.stderr, flush=True)
            time.sleep(0.5)  # the pause of whoever starts it again


async def _consume_async(spec: dict[str, Any], misbehaviour: Misbehaviour, options: dict[str, Any]) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(spec["async_dsn"], pool_pre_ping=True, pool_size=10)

    async def take(message: ReceivedMessage, session: Any) -> None:
        await asyncio.sleep(misbehaviour.before(message))  # a slow handler
        session.add(_row(spec["who"], message))

    while True:
        consumer = AsyncConsumer(spec["url"], inbox=Inbox(engine), **options)
        consumer.subscribe(spec["topic"], **_subscription(spec))(take)
        try:
            await consumer.run()
            return
        except NotifyError as refusal:
            print(refusal, file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)  # the pause of whoever starts it again


def main() -> None:
    {"produce": produce, "consume": consume}[sys.argv[1]](json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
