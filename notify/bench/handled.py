"""Consumers of a bench in one process, whose handlers only note what they get: the SDK's, or plain clients beside them.

Run as `python -m notify.bench.handled` with a JSON specification. It prints `subscribed` before it consumes, and one
JSON object at the end. It ends when each group has `expected` messages, `seconds` after the first message, or when the
file `stop` exists and no more messages come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.client
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from notify import ids
from notify.bench.consume import ranges
from notify.client import AsyncConsumer, Consumer, Inbox, ReceivedMessage, create_tables, use_explicit_begin
from notify.client.table import notify_inbox
from notify.databases import database_now
from notify.wire import Settle, encode_msgpack

CONCURRENCY = 16
"""The SDK's default, and the connections of an inbox's engine."""
PLAIN_MAX, PLAIN_WAIT, PLAIN_LEASE = 2048, 1.0, 60
KAFKA_BATCH = 500
"""Records between two commits of the plain consumer of Kafka."""
LOOK_SECONDS = 0.3
"""How often the file `stop` is looked for, and how long no message has come then."""
UNBOUNDED = 1 << 62
LONGEST_SECONDS = 3600.0


class Order(msgspec.Struct):
    """The body that `notify.bench.fill` makes with `orders`."""

    number: int
    text: str


class Run:
    """The measured time, from the first message of any group to the last of all, and the end of all groups."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.groups = [Group(name, spec.get("expected") or UNBOUNDED, self) for name in spec["groups"]]
        self.stops: list[Callable[[], None]] = []
        """Called once at the end, by any thread."""
        self.is_over = False
        self.seconds = self.cpu_seconds = 0.0
        self.counted = 0
        """The messages of the measured time."""
        self._lock = threading.Lock()
        self._not_done = len(self.groups)
        self._first_at = self._cpu = 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """A group has its first message."""
        with self._lock:
            if self._first_at:
                return
            self._first_at, self._cpu = time.perf_counter(), time.process_time()
            self._timer = threading.Timer(self.spec.get("seconds") or LONGEST_SECONDS, self.end)
            self._timer.daemon = True
            self._timer.start()

    def done(self) -> None:
        """A group has all its messages."""
        with self._lock:
            self._not_done -= 1
            if self._not_done:
                return
        self.end()

    def end(self) -> None:
        """Note time and CPU time, and stop all groups."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            if self._first_at:
                self.seconds = time.perf_counter() - self._first_at
                self.cpu_seconds = time.process_time() - self._cpu
            self.counted = sum(len(group.ids) for group in self.groups)
            if self._timer is not None:
                self._timer.cancel()
        for stop in self.stops:
            stop()

    def end_when_told(self) -> None:
        """End once the file `stop` exists and no message has come for a while."""
        seen = -1
        while not self.is_over:
            time.sleep(LOOK_SECONDS)
            before, seen = seen, sum(len(group.ids) for group in self.groups)
            if seen == before and Path(self.spec["stop"]).exists():
                self.end()


class Group:
    """One group and the messages that its handler got. Threads may note at once: `append` is one step to them."""

    def __init__(self, name: str, expected: int, run: Run) -> None:
        self.name = name
        self.ids: list[Any] = []
        self.timed: list[tuple[str, str, float]] = []
        """Id, instant of the commit, and when it was handled, in seconds since 1970; where the run has a `stop`."""
        self._run = run
        self.expected = expected
        self._next = 1
        self._is_done = False

    def note(self, message_id: Any) -> None:
        self.ids.append(message_id)
        if len(self.ids) >= self._next:
            self._turn()

    def note_all(self, message_ids: Sequence[Any]) -> None:
        self.ids.extend(message_ids)
        if len(self.ids) >= self._next:
            self._turn()

    def _turn(self) -> None:
        """The first message, or the last."""
        if self._next == 1:
            self._next = self.expected
            self._run.begin()
        if len(self.ids) >= self.expected and not self._is_done:
            self._is_done, self._next = True, UNBOUNDED
            self._run.done()

    def handlers(self) -> dict[str, Callable[..., None]]:
        """The same empty handler in each shape that the SDK calls."""
        note, note_all, timed = self.note, self.note_all, self.timed

        def single(message: ReceivedMessage) -> None:
            note(message.id)

        def batch(messages: list[ReceivedMessage]) -> None:
            note_all([message.id for message in messages])

        def single_typed(order: Order) -> None:
            note(order.number)

        def batch_typed(orders: list[Order]) -> None:
            note_all([order.number for order in orders])

        def single_inbox(message: ReceivedMessage, session: Session) -> None:
            note(message.id)

        def batch_inbox(messages: list[ReceivedMessage], session: Session) -> None:
            note_all([message.id for message in messages])

        def single_timed(message: ReceivedMessage) -> None:
            timed.append((message.id, message.committed_at, time.time()))
            note(message.id)

        shapes = single, batch, single_typed, batch_typed, single_inbox, batch_inbox, single_timed
        return {function.__name__: function for function in shapes}

    def handler(self, spec: dict[str, Any]) -> Callable[..., None]:
        """The handler that the specification asks for."""
        kinds = (("_typed", "typed"), ("_inbox", "inbox"), ("_timed", "stop"))
        kind = next((name for name, key in kinds if spec.get(key)), "")
        return self.handlers()[("batch" if spec.get("batch") else "single") + kind]


# --- the SDK's ------------------------------------------------------------------------------------------------------


def _consumer(kind: Callable[..., Any], group: Group, run: Run, inbox: Inbox | None, handler: Any) -> Any:
    """A consumer of the SDK for one group, subscribed to all topics."""
    spec = run.spec
    consumer = kind(spec["url"], group=group.name, inbox=inbox, concurrency=CONCURRENCY)
    for topic in spec["topics"]:
        consumer.subscribe(topic, start="earliest", mode=spec.get("mode", "shared"), batch=spec.get("batch"))(handler)
    run.stops.append(consumer.stop)
    return consumer


def threads(run: Run) -> None:
    """A `Consumer` for each group."""
    inbox = Inbox(_engine(run)) if run.spec.get("inbox") else None
    consumers = [_consumer(Consumer, group, run, inbox, group.handler(run.spec)) for group in run.groups]
    _in_threads(run, [functools.partial(consumer.run, signals=False) for consumer in consumers])


def _engine(run: Run) -> sa.Engine:
    """An engine of the database that the specification names, with Notify's tables."""
    engine = sa.create_engine(run.spec["inbox"], pool_size=CONCURRENCY, max_overflow=0)
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    create_tables(engine)
    return engine


async def _async_engine(run: Run) -> AsyncEngine:
    dsn = run.spec["inbox"].replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(dsn, pool_size=CONCURRENCY, max_overflow=0)
    if engine.dialect.name == "sqlite":
        use_explicit_begin(engine)
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    return engine


def coroutines(run: Run) -> None:
    """An `AsyncConsumer` for each group, all on one event loop."""
    asyncio.run(_coroutines(run))


async def _coroutines(run: Run) -> None:
    inbox = engine = None
    if run.spec.get("inbox"):
        engine = await _async_engine(run)
        inbox = Inbox(engine)
    consumers = [_consumer(AsyncConsumer, group, run, inbox, _async(group.handler(run.spec))) for group in run.groups]
    try:
        await asyncio.gather(*(consumer.run() for consumer in consumers))
    finally:
        if engine is not None:
            await engine.dispose()


def _async(function: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def handle(*arguments: Any) -> None:
        function(*arguments)

    return handle


# --- what an inbox does, without the SDK: a transaction by SQLAlchemy with the row and the handler's effect ----------

_INSERT = notify_inbox.insert().values(created_at=database_now())


def _rows(group: Group, run: Run) -> Iterator[dict[str, Any]]:
    """A row for each message of a pile, until the run is over. Threads may share it: `count` is one step to them."""
    for number in itertools.count():
        if run.is_over or number >= group.expected:
            return
        yield {"consumer_group": group.name, "message_id": f"{ids.to_text(ids.new_id())}.0", "replay": 0}


def by_hand(run: Run) -> None:
    """Transactions of a Session in as many threads as a `Consumer` has, on SQLite one after the other."""
    engine = _engine(run)
    (group,) = run.groups
    rows, taking = _rows(group, run), threading.Lock()
    turn = threading.Lock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()

    def work() -> None:
        while True:
            with taking:
                row = next(rows, None)
            if row is None:
                return
            with turn, Session(engine) as session, session.begin():
                session.execute(_INSERT, row)
                group.note(row["message_id"])

    _in_threads(run, [work] * CONCURRENCY)


def by_hand_async(run: Run) -> None:
    """`by_hand` with an AsyncSession, in as many tasks as an `AsyncConsumer` has."""
    asyncio.run(_by_hand_async(run))


async def _by_hand_async(run: Run) -> None:
    engine = await _async_engine(run)
    (group,) = run.groups
    rows = _rows(group, run)
    turn = asyncio.Lock() if engine.dialect.name == "sqlite" else contextlib.nullcontext()

    async def work() -> None:
        for row in rows:
            async with turn, AsyncSession(engine) as session, session.begin():
                await session.execute(_INSERT, row)
                group.note(row["message_id"])

    await asyncio.gather(*[work() for _ in range(CONCURRENCY)])
    await engine.dispose()


# --- clients of the same servers without the SDK --------------------------------------------------------------------


def plain(run: Run) -> None:
    """For each group what a short script does over HTTP: receive many, handle one after another, settle in ranges."""
    _in_threads(run, [functools.partial(_plain, run, group) for group in run.groups])


def _plain(run: Run, group: Group) -> None:
    address = urlsplit(run.spec["url"])
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=90)

    def call(path: str, body: bytes) -> bytes:
        connection.request("POST", f"/v1/groups/{group.name}/{path}", body, {"content-type": "application/msgpack"})
        answer = connection.getresponse()
        read = answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status}: {read[:300]!r}")
        return read

    note, is_timed = group.note, run.spec.get("stop")
    asked = msgspec.msgpack.encode({"instance": "plain", "max": PLAIN_MAX, "wait": PLAIN_WAIT, "lease": PLAIN_LEASE})
    while not run.is_over:
        messages = msgspec.msgpack.decode(call("receive", asked))["messages"]
        for message in messages:
            if is_timed:
                group.timed.append((message["id"], message["committed_at"], time.time()))
            note(message["id"])
        if messages:
            call("settle", encode_msgpack(Settle(ranges([message["receipt"] for message in messages]))))
    connection.close()


def confluent(run: Run) -> None:
    """For each group a consumer as the manual of Kafka's client has it: a batch, its handlers one by one, a commit."""
    _in_threads(run, [functools.partial(_confluent, run, group) for group in run.groups])


def _confluent(run: Run, group: Group) -> None:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": run.spec["url"].removeprefix("kafka://"),
            "group.id": group.name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe(run.spec["topics"])
    note = group.note
    while not run.is_over:
        records = [record for record in consumer.consume(KAFKA_BATCH, 1.0) if record.error() is None]
        for record in records:
            note((record.partition(), record.offset()))
        if records:
            consumer.commit(asynchronous=False)
    consumer.close()


def _in_threads(run: Run, calls: Sequence[Callable[[], None]]) -> None:
    """Call all at once, an only one in this thread. If one fails, all end, and its error is raised."""
    if len(calls) == 1:
        calls[0]()
        return
    failed: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)
            run.end()

    running = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


CLIENTS: dict[str, Callable[[Run], None]] = {
    "plain": plain,
    "threads": threads,
    "coroutines": coroutines,
    "confluent": confluent,
    "by_hand": by_hand,
    "by_hand_async": by_hand_async,
}


def result(run: Run) -> dict[str, Any]:
    """The figures of a run that has ended, and its files."""
    timed = [each for group in run.groups for each in group.timed]
    if run.spec.get("seen"):
        counts = Counter(message_id.partition(".")[0] for group in run.groups for message_id in group.ids)
        Path(run.spec["seen"]).write_text(json.dumps(counts))
    if run.spec.get("handled"):
        handled = {message_id.partition(".")[0]: at for message_id, _, at in timed}
        Path(run.spec["handled"]).write_text(json.dumps(handled))
    latencies = sorted(at - datetime.fromisoformat(committed).timestamp() for _, committed, at in timed)
    groups = [{"group": each.name, "received": len(each.ids), "unique": len(set(each.ids))} for each in run.groups]
    return {
        "groups": groups,
        "delivered": sum(len(group.ids) for group in run.groups),
        "counted": run.counted,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "per_second": run.counted / max(run.seconds, 1e-9),
        "latencies": latencies[:: max(1, len(latencies) // 20_000)],
        "counts_file": run.spec.get("seen"),
    }


def main() -> None:
    """Consume by the specification in argv[1]."""
    run = Run(json.loads(sys.argv[1]))
    gc.freeze()
    print("subscribed", flush=True)
    if run.spec.get("stop"):
        threading.Thread(target=run.end_when_told, daemon=True).start()
    CLIENTS[run.spec["client"]](run)
    print(json.dumps(result(run)))


if __name__ == "__main__":
    main()
