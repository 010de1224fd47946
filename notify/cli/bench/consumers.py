"""Consumers of a bench in one process, which only note what they get: the SDK's with an empty handler, a short script
without the SDK, and the bare client, which takes runs and calls no handler.

Run as `python -m notify.cli.bench.consumers` with a JSON specification. It prints `subscribed` before it consumes, and
one JSON object at the end. It ends when each group has `expected` messages, `seconds` after the first message, or when
the file `stop` exists and no more messages come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.client
import json
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from notify.client import AsyncConsumer, Consumer, Inbox, ReceivedMessage
from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.errors import NotifyError
from notify.protocol import ids
from notify.protocol.wire import RUN_HEAD, DeliveredRun, Receive, Received, Settle, SettleItem, encode_msgpack

CONCURRENCY = 16
"""The SDK's default, and the connections of an inbox's engine."""
PLAIN_MAX, PLAIN_WAIT, PLAIN_LEASE = 2048, 1.0, 60
WIRE_MAX, WIRE_WAIT, WIRE_LEASE = 2048, 0.3, 60
WIRE_ID = 18
"""The bytes of a RUN_HEAD that are the message's id: its transaction's, and its number there."""
WIRE_SETTLING = 4
"""Its requests to settle that may be on their way."""
FEW = 200
"""The bare client times the first message only of larger answers."""
LOOK_SECONDS = 0.3
"""How often the file `stop` is looked for, and how long no message has come then."""
UNBOUNDED = 1 << 62
LONGEST_SECONDS = 3600.0


class Run:
    """The measured time, and the end of all groups.

    As in the peers' drivers (tools/bench/peers/java/Drain.java) the clock starts when the last group has its first
    messages, and what came until then does not count; where that is half of all or more, it starts with the first
    message of any group. It ends when each group has all its messages, however many are not settled yet.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        kind = WireGroup if spec["client"] == "wire" else Group
        self.groups = [kind(name, spec.get("expected") or UNBOUNDED, self) for name in spec["groups"]]
        self.stops: list[Callable[[], None]] = []
        """Called once at the end, by any thread."""
        self.is_over = False
        self.is_cut = False
        """Whether it ended because its time was over."""
        self.seconds = self.cpu_seconds = 0.0
        self.counted = 0
        """The messages of the measured time."""
        self._lock = threading.Lock()
        self._not_begun = len(self.groups)
        self._not_done = len(self.groups) - len(spec.get("slow", ()))
        self._starts: list[tuple[float, float, int]] = []
        """Instant, CPU time so far and messages so far, when the first group and the last one had begun."""
        self._timer: threading.Timer | None = None

    def received(self) -> int:
        """The messages of all groups so far."""
        return sum(group.received for group in self.groups)

    def begin(self) -> None:
        """A group has its first messages."""
        with self._lock:
            self._not_begun -= 1
            if not self._starts:
                self._starts.append((time.perf_counter(), time.process_time(), 0))
                self._timer = threading.Timer(self.spec.get("seconds") or LONGEST_SECONDS, self._cut)
                self._timer.daemon = True
                self._timer.start()
            if not self._not_begun:
                self._starts.append((time.perf_counter(), time.process_time(), self.received()))

    def done(self) -> None:
        """A group has all its messages."""
        with self._lock:
            self._not_done -= 1
            if self._not_done:
                return
        self.end()

    def _cut(self) -> None:
        self.is_cut = not self.is_over
        self.end()

    def end(self) -> None:
        """Note time and CPU time, and stop all groups."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            if self._starts:
                received = self.received()
                at, cpu, before = self._starts[-1]
                if 2 * before > received:
                    at, cpu, before = self._starts[0]
                self.seconds = (max(group.last_at for group in self.groups) or time.perf_counter()) - at
                self.cpu_seconds = time.process_time() - cpu
                self.counted = received - before
            if self._timer is not None:
                self._timer.cancel()
        for stop in self.stops:
            stop()

    def end_when_told(self) -> None:
        """End once the file `stop` exists and no message has come for a while."""
        seen = -1
        while not self.is_over:
            time.sleep(LOOK_SECONDS)
            before, seen = seen, self.received()
            if seen == before and Path(self.spec["stop"]).exists():
                self.end()


class Group:
    """One group and the messages that its handler got. Threads may note at once: `append` is one step to them."""

    def __init__(self, name: str, expected: int, run: Run) -> None:
        self.name = name
        self.ids: list[Any] = []
        self.timed: list[tuple[str, str, float]] = []
        """Id, instant of the commit, and when it was handled, in seconds since 1970; where the run has a `stop`."""
        self.last_at = 0.0
        """When its last message came, where that is noted, by `time.perf_counter`."""
        self._run = run
        self.expected = expected
        self._next = 1
        self._is_done = False

    @property
    def received(self) -> int:
        return len(self.ids)

    def figures(self) -> dict[str, Any]:
        """Its part of the result."""
        return {"group": self.name, "received": self.received, "unique": len(set(self.ids))}

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
        if self.received >= self.expected and not self._is_done:
            self._is_done, self._next = True, UNBOUNDED
            self._run.done()

    def handler(self) -> Callable[..., None]:
        """The empty handler of single messages."""
        note, timed, is_timed = self.note, self.timed, bool(self._run.spec.get("stop"))

        def single(message: ReceivedMessage) -> None:
            note(message.id)

        def single_timed(message: ReceivedMessage) -> None:
            timed.append((message.id, message.committed_at, time.time()))
            note(message.id)

        return single_timed if is_timed else single


# --- the SDK's ------------------------------------------------------------------------------------------------------


HandlerOf = Callable[[Group], Callable[..., None]]


def _consumer(kind: Callable[..., Any], group: Group, run: Run, inbox: Inbox | None, handler: Any) -> Any:
    """A consumer of the SDK for one group, subscribed to all topics."""
    spec = run.spec
    consumer = kind(spec["url"], group=group.name, inbox=inbox, concurrency=CONCURRENCY)
    for topic in spec["topics"]:
        consumer.subscribe(topic, start="earliest", mode=spec.get("mode", "shared"), batch=spec.get("batch"))(handler)
    run.stops.append(consumer.stop)
    return consumer


def threads(run: Run, handler_of: HandlerOf = Group.handler, inbox: Inbox | None = None) -> None:
    """A `Consumer` for each group."""
    consumers = [_consumer(Consumer, group, run, inbox, handler_of(group)) for group in run.groups]
    in_threads(run, [functools.partial(consumer.run, signals=False) for consumer in consumers])


def coroutines(run: Run) -> None:
    """An `AsyncConsumer` for each group, all on one event loop."""
    asyncio.run(on_a_loop(run))


async def on_a_loop(run: Run, handler_of: HandlerOf = Group.handler, inbox: Inbox | None = None) -> None:
    """`coroutines`, on the loop that runs."""
    consumers = [_consumer(AsyncConsumer, group, run, inbox, _async(handler_of(group))) for group in run.groups]
    await asyncio.gather(*(consumer.run() for consumer in consumers))


def _async(function: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def handle(*arguments: Any) -> None:
        function(*arguments)

    return handle


# --- clients of the same servers without the SDK --------------------------------------------------------------------


class WireGroup(Group):
    """A group of the bare client. A byte for each offset says whether it came: a pile has millions of messages."""

    def __init__(self, name: str, expected: int, run: Run) -> None:
        super().__init__(name, expected, run)
        self.body_bytes = 0
        self.counts: Counter[bytes] | None = Counter() if run.spec.get("seen") else None
        """How often each transaction came, by its id."""
        self.handled: dict[bytes, float] | None = {} if run.spec.get("handled") else None
        """When each transaction came, in seconds since 1970."""
        self._seen: dict[tuple[str, int], bytearray] = {}
        self._received = self._unique = 0
        self._first_at = 0.0
        self._latencies = array("d")
        self._marks: list[tuple[float, int]] = []
        """Instants, and the messages until then."""

    @property
    def received(self) -> int:
        return self._received

    def note_runs(self, runs: list[DeliveredRun]) -> None:
        """Look at each message of an answer: at its id and its body."""
        now, self.last_at = time.time(), time.perf_counter()
        self._first_at = self._first_at or self.last_at
        count = 0
        for run in runs:
            heads = run.heads
            message_ids = [heads[at : at + WIRE_ID] for at in range(0, len(heads), RUN_HEAD.size)]
            different = len(set(message_ids))
            self.body_bytes += sum([len(message.body) for message in run.messages])
            self._unique += min(different, self._mark(run))
            count += len(run.messages)
            if self.counts is not None:
                self.counts.update([message_id[:16] for message_id in message_ids])
            if self.handled is not None:
                self.handled.update([(message_id[:16], now) for message_id in message_ids])
            timed = heads if len(message_ids) < FEW else heads[: RUN_HEAD.size]
            self._latencies.extend([now - committed_us / 1e6 for _, _, committed_us in RUN_HEAD.iter_unpack(timed)])
        self._received += count
        self._marks.append((self.last_at, self._received))
        if self._received >= self._next:
            self._turn()

    def _mark(self, run: DeliveredRun) -> int:
        """Mark a run's offsets; how many of them had not come before."""
        seen = self._seen.setdefault((run.messages[0].topic, run.queue), bytearray())
        unseen = 0
        for first, count in run.offsets:
            end = first + count
            if end > len(seen):
                seen.extend(bytes(max(end - len(seen), len(seen))))
            unseen += seen.count(0, first, end)
            seen[first:end] = b"\1" * count
        return unseen

    def latencies(self) -> list[float]:
        """Seconds from the commit, in order of size, thinned out."""
        latencies = sorted(self._latencies)
        return latencies[:: max(1, len(latencies) // 20_000)]

    def figures(self) -> dict[str, Any]:
        return {
            "group": self.name, "received": self._received, "unique": self._unique, "body_bytes": self.body_bytes,
            "seconds": max(self.last_at - self._first_at, 1e-9), "latencies": self.latencies(),
            "marks": self._marks[:: max(1, len(self._marks) // 1000)],
        }  # fmt: skip


def wire(run: Run) -> None:
    """All groups on one event loop: each asks for runs, decodes them, looks at each message, and settles the run."""

    async def all_groups() -> None:
        await asyncio.gather(*(_wire(run, group) for group in run.groups if isinstance(group, WireGroup)))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(all_groups())


async def _wire(run: Run, group: WireGroup) -> None:
    spec = run.spec
    http = HttpClient(spec["url"])
    decode = msgspec.msgpack.Decoder(Received).decode
    request = encode_msgpack(
        Receive(
            instance=f"{group.name}-bench", topics=spec.get("topics"), max=WIRE_MAX, wait=WIRE_WAIT, lease=WIRE_LEASE
        )
    )
    is_slow = group.name in spec.get("slow", ())
    settling: set[asyncio.Task[bytes]] = set()

    def ask() -> asyncio.Task[bytes]:
        return asyncio.ensure_future(http.call("POST", f"/v1/groups/{group.name}/receive?runs=yes", request, 90))

    asked = ask()
    while not run.is_over:
        answer = await asked
        if not is_slow:
            # One request is ahead. Two or three brought less: 0.88 and 0.76 of the rate.
            asked = ask()
            await asyncio.sleep(0)  # it is sent before this answer is decoded
        received = decode(answer)
        if received.messages:
            raise NotifyError("the server is older than its benches: it does not hand out runs")
        if not received.runs:
            if is_slow:
                asked = ask()
            continue
        group.note_runs(received.runs)
        if is_slow:
            break  # it holds its messages, and asks for no more
        items = [SettleItem(receipt=f"{run.lease}.0-{len(run.messages) - 1}", action="ack") for run in received.runs]
        settle = http.call("POST", f"/v1/groups/{group.name}/settle", encode_msgpack(Settle(items)), 60)
        settling.add(asyncio.ensure_future(settle))
        if len(settling) >= WIRE_SETTLING:
            _, settling = await asyncio.wait(settling, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()  # what it would get goes to others
    await asyncio.gather(*settling)
    http.close()


def ranges(receipts: list[str]) -> list[SettleItem]:
    """Items that acknowledge these receipts; consecutive receipts of one lease become one range."""
    items: list[SettleItem] = []
    lease, first, last = "", 0, -1
    for receipt in [*receipts, "."]:
        token, _, index = receipt.partition(".")
        if token == lease and index and int(index) == last + 1:
            last += 1
            continue
        if lease:
            items.append(SettleItem(receipt=f"{lease}.{first}-{last}", action="ack"))
        if index:
            lease, first, last = token, int(index), int(index)
    return items


def plain(run: Run) -> None:
    """For each group what a short script does over HTTP: receive many, handle one after another, settle in ranges."""
    in_threads(run, [functools.partial(_plain, run, group) for group in run.groups])


def _plain(run: Run, group: Group) -> None:
    """Receive, handle and settle until the run is over."""
    with contextlib.closing(Script(run.spec["url"], group.name)) as script:
        while not run.is_over:
            messages = script.received("receive")["messages"]
            for message in messages:
                if run.spec.get("stop"):
                    group.timed.append((message["id"], message["committed_at"], time.time()))
                group.note(message["id"])
            script.settle(ranges([message["receipt"] for message in messages]))


class Script:
    """The requests of a short script over HTTP, on one connection."""

    def __init__(self, url: str, group: str) -> None:
        address = urlsplit(url)
        self._group = group
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=90)
        self._asked = msgspec.msgpack.encode(
            {"instance": "plain", "max": PLAIN_MAX, "wait": PLAIN_WAIT, "lease": PLAIN_LEASE}
        )
        self.close = self._connection.close

    def _call(self, path: str, body: bytes) -> bytes:
        headers = {"content-type": "application/msgpack"}
        self._connection.request("POST", f"/v1/groups/{self._group}/{path}", body, headers)
        answer = self._connection.getresponse()
        read = answer.read()
        if answer.status != 200:
            raise OSError(f"{answer.status}: {read[:300]!r}")
        return read

    def received(self, path: str) -> dict[str, Any]:
        """The answer to a request for messages, or for runs. Raises OSError."""
        answer: dict[str, Any] = msgspec.msgpack.decode(self._call(path, self._asked))
        return answer

    def settle(self, items: list[SettleItem]) -> None:
        """Acknowledge. Raises OSError."""
        if items:
            self._call("settle", encode_msgpack(Settle(items)))


def in_threads(run: Run, calls: Sequence[Callable[[], None]]) -> None:
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
    "wire": wire,
    "plain": plain,
    "threads": threads,
    "coroutines": coroutines,
}


def result(run: Run) -> dict[str, Any]:
    """The figures of a run that has ended, and its files."""
    counts: Counter[str] = Counter()
    handled: dict[str, float] = {}
    latencies: list[float] = []
    for group in run.groups:
        if isinstance(group, WireGroup):
            counts.update({ids.to_text(transaction): count for transaction, count in (group.counts or {}).items()})
            handled |= {ids.to_text(transaction): at for transaction, at in (group.handled or {}).items()}
            latencies += group.latencies()
        else:
            if run.spec.get("seen"):
                counts.update(message_id.partition(".")[0] for message_id in group.ids)
            handled |= {message_id.partition(".")[0]: at for message_id, _, at in group.timed}
            latencies += [at - datetime.fromisoformat(committed).timestamp() for _, committed, at in group.timed]
    for name, found in (("seen", counts), ("handled", handled)):
        if run.spec.get(name):
            Path(run.spec[name]).write_text(json.dumps(found))
    return {
        "groups": [group.figures() for group in run.groups],
        "delivered": run.received(),
        "counted": run.counted,
        "seconds": run.seconds,
        "is_cut": run.is_cut,
        "cpu_seconds": run.cpu_seconds,
        "per_second": run.counted / max(run.seconds, 1e-9),
        "latencies": sorted(latencies)[:: max(1, len(latencies) // 20_000)],
        "counts_file": run.spec.get("seen"),
    }


def main(clients: Mapping[str, Callable[[Run], None]] = CLIENTS) -> None:
    """Consume by the specification in argv[1]."""
    run = Run(json.loads(sys.argv[1]))
    gc.freeze()
    print("subscribed", flush=True)
    if run.spec.get("stop"):
        threading.Thread(target=run.end_when_told, daemon=True).start()
    clients[run.spec["client"]](run)
    print(json.dumps(result(run)))


if __name__ == "__main__":
    main()
