"""Requests of a transaction that are held, cut, repeated and late, before a real broker: nothing is lost or doubled.

A cell of the matrix is a request of transaction n, what happens to it, and the request of transaction n+1 before which
its bytes arrive. Kafka's client repeats a request whose connection broke, and is told that all is well; until its
producer has another epoch, a broker cannot tell the first bytes from a request of the next transaction
(https://jepsen.io/analyses/bufstream-0.1.0, KAFKA-17402).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from notify.client import Consumer, DeadLetter, create_tables
from notify.client.tables.definitions import half_message
from notify.errors import Conflict, Unavailable
from notify.movers.relay.relay import Relay
from notify.movers.sinks.sink import Sink
from notify.protocol import ids
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch, PackedMessage
from tests.history.kafka_log import open_transactions
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.databases import empty_database
from tests.support.groups import running
from tests.support.kafka import KafkaNode, committed, patient_sink
from tests.support.kafka_proxy import Api, Fault, Planned, Which
from tests.support.shop import make_engine

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from notify.kafka.cluster import Cluster
from notify.kafka.groups import dead_letter_topic, retry_topic, transactional_id
from notify.kafka.records import ID
from notify.kafka.undelivered import UndeliveredList
from notify.movers.sinks.delays.delayed_record import delayed_headers
from notify.movers.sinks.delays.releaser import Releaser, in_background, wall_us
from notify.movers.sinks.delays.topics import make_wheels
from notify.movers.sinks.delays.wheels import SECOND_US, wheels_of
from notify.movers.sinks.kafka import KafkaSink
from notify.server.groups.kafka.brokers import Brokers
from notify.server.groups.kafka.letters import read as dead_letters
from notify.server.groups.kafka.redriven import Redriven
from tests.support.delayed import refuse, texts_of
from tests.support.kafka_consumers import admin_of, make_topic, produce, progress

CALL_SECONDS = 3.0
"""How long a sink waits for a request that is held."""
ASKED_AGAIN_MILLISECONDS = 1500
"""How long Kafka's client waits for an answer before it asks again over another connection; by default a minute."""
MOST_SECONDS = 3 * PATIENCE_SECONDS
"""A cell that takes longer hangs."""
AT_ONCE = 12
"""So many cells run at the same time: most of a cell is waiting."""
PART_SECONDS = 2.0
"""How long a part of a large transaction is waited for, of which nothing comes once its transaction has ended."""
PARTITIONS, LETTERS = 4, "abcdef"
"""The first two of these keys have one partition, and the next two another each."""

BATCH, PARTS, TAKEN_BACK = "batch", "parts", "taken back"
"""A batch of transactions; a large transaction in parts; one in parts that is rolled back in the source."""
BETWEEN = (Api.END_TXN, 0)
"""The point between two transactions."""
Point = tuple[Api, int]
"""The nth request of this kind in transaction n+1."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`then`: what comes after the transaction with the fault. `point`: before which request of it bytes arrive."""

    request: Api
    fault: Fault
    point: Point = BETWEEN
    first: str = BATCH
    then: str = BATCH

    @property
    def where(self) -> str:
        return "between" if self.point == BETWEEN else f"before {self.point[0].name} {self.point[1]}"

    def __str__(self) -> str:
        return f"{self.first}, then {self.then}: {self.request.name} {self.fault.value}, {self.where}"

    def plan(self, node: KafkaNode, about: bytes) -> Planned:
        """Wait for the request with these bytes in it."""
        until: Sequence[Which] | None
        if self.fault in (Fault.CUT_BEFORE, Fault.CUT_AFTER):
            until = None
        elif self.point == BETWEEN:
            until = ()
        else:
            # The transaction with the fault ends first: where its end is late, by its repetition.
            is_end = self.request is Api.END_TXN and self.fault is Fault.REPEATED
            end = () if is_end else (Which(Api.END_TXN, about),)
            until = (*end, Which(self.point[0], about, nth=self.point[1]))
        return node.proxy.plan(Which(self.request, about), self.fault, until)

    def url(self, node: KafkaNode) -> str:
        return f"{node.url}?socket.timeout.ms={ASKED_AGAIN_MILLISECONDS}" if self.fault is Fault.HELD else node.url


class Wrong(NamedTuple):
    """A fault that a cell shows: `lost`, `doubled`, `phantom`, or how it did not come to its end."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


LOST, DOUBLED, PHANTOM, STUCK, FAILED = "lost", "doubled", "phantom", "stuck", "failed"


@dataclass(slots=True)
class Seen:
    """The result of a cell."""

    wrong: list[Wrong] = field(default_factory=list)
    has_hit: bool = False
    has_met_its_point: bool = False

    def compare(self, wanted: Iterable[str], never: Iterable[str], texts: Sequence[str]) -> None:
        """Note what is lost, doubled, or there although it was rolled back."""
        counts = Counter(texts)
        kinds = {
            LOST: [text for text in wanted if not counts[text]],
            DOUBLED: [text for text, count in counts.items() if count > 1],
            PHANTOM: [text for text in never if counts[text]],
        }
        self.wrong += [Wrong(kind, " ".join(sorted(some))) for kind, some in kinds.items() if some]

    def note(self, planned: Planned) -> None:
        """Note that the next transaction has ended: what was late has met its point, or did not wait for one."""
        self.has_hit, self.has_met_its_point = planned.has_hit, planned.has_met_its_point or planned.is_over

    def __str__(self) -> str:
        how = "" if self.has_met_its_point or not self.has_hit else " (its point never came: later)"
        return ("; ".join(map(str, self.wrong)) or "right") + (how if self.has_hit else " (the request never came)")


class Verdicts:
    """The cells that were run, by who met them, and the verdict about all of them."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Cell, Seen]] = []

    def take(self, who: str, seen: Mapping[Cell, Seen]) -> None:
        """Add cells. Fails if one of them is wrong, or shows nothing because its request never came."""
        self._seen += [(who, cell, said) for cell, said in seen.items()]
        assert [f"{cell}: {said}" for cell, said in seen.items() if said.wrong or not said.has_hit] == []

    def __bool__(self) -> bool:
        return bool(self._seen)

    def __str__(self) -> str:
        """A table for each who: a line for each request and point, with how many of the cells of a fault are right."""
        faults = list(Fault)
        lines: list[str] = []
        for who in dict.fromkeys(who for who, _, _ in self._seen):
            rows: dict[tuple[str, str], dict[Fault, list[Seen]]] = {}
            for _, cell, said in filter(lambda each: each[0] == who, self._seen):
                rows.setdefault((cell.request.name, cell.where), {}).setdefault(cell.fault, []).append(said)
            lines += ["", f"{who:54}" + "".join(f"{fault.value:>12}" for fault in faults)]
            for (request, where), by_fault in rows.items():
                figures = [by_fault.get(fault, []) for fault in faults]
                right = [f"{sum(not s.wrong for s in some)}/{len(some)}" if some else "" for some in figures]
                lines.append(f"{request:22}{where:32}" + "".join(f"{figure:>12}" for figure in right))
        bad = [(who, cell, said) for who, cell, said in self._seen if said.wrong or not said.has_hit]
        lines += ["", *(f"{who}: {cell}: {said}" for who, cell, said in bad)]
        kinds = Counter(wrong.kind for _, _, said in self._seen for wrong in said.wrong)
        counts = ", ".join(f"{kind} {kinds[kind]}" for kind in (LOST, DOUBLED, PHANTOM, STUCK, FAILED))
        late = sum(said.has_hit and not said.has_met_its_point for _, _, said in self._seen)
        never = sum(not said.has_hit for _, _, said in self._seen)
        verdict = "FAIL" if kinds else "INCONCLUSIVE" if never else "PASS"
        lines.append(
            f"VERDICT: {verdict}, {len(self._seen)} cells: {counts}; the request never came in {never}, and in {late} "
            "the point never came, so that it was even later"
        )
        return "\n".join(lines)


@pytest.fixture(scope="module")
def node(kafka_node: KafkaNode) -> Iterator[KafkaNode]:
    """A node with all topics of its own, which take seconds to make: the bounds of cells are short."""

    async def claim() -> None:
        sink = patient_sink(kafka_node.url)
        await sink.claim("first")
        await sink.close()

    asyncio.run(claim())
    yield kafka_node
    assert kafka_node.cluster.is_running(0), kafka_node.cluster.last_output(0)


@pytest.fixture(scope="module")
def verdicts() -> Iterator[Verdicts]:
    """All cells of this module, whose verdict `make matrix-kafka` shows at the end."""
    verdicts = Verdicts()
    yield verdicts
    if verdicts:
        print(verdicts, flush=True)


def beside_each_other(cells: Sequence[Cell], run: Callable[[Cell, Seen], None]) -> dict[Cell, Seen]:
    """Run cells beside each other, each in a thread, with topics and clients of its own."""
    seen = {cell: Seen() for cell in cells}

    def one(cell: Cell) -> None:
        try:
            run(cell, seen[cell])
        except (AssertionError, TimeoutError) as stuck:
            seen[cell].wrong.append(Wrong(STUCK, str(stuck) or f"it has not ended after {MOST_SECONDS:g} s"))
        except Exception as error:
            seen[cell].wrong.append(Wrong(FAILED, repr(error)))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one, cells))
    return seen


def test_a_cell_that_is_stuck_or_fails_stands_alone() -> None:
    """It lost whether its request had come, and one that failed ended the others."""
    late, held, cut = (Cell(Api.END_TXN, fault) for fault in (Fault.LATE, Fault.HELD, Fault.CUT_AFTER))

    def run(cell: Cell, seen: Seen) -> None:
        seen.has_hit = seen.has_met_its_point = True
        if cell is late:
            seen.compare(["a", "b", "c"], ["d"], ["a", "a", "b", "d"])
            raise AssertionError("waited in vain")
        if cell is held:
            raise Unavailable("no broker")

    verdicts = Verdicts()
    with pytest.raises(AssertionError, match="waited in vain"):
        verdicts.take("one", beside_each_other([late, held, cut], run))
    assert "never came in 0" in str(verdicts)
    assert "VERDICT: FAIL, 3 cells: lost 1, doubled 1, phantom 1, stuck 1, failed 1;" in str(verdicts)
    quiet = Verdicts()
    with pytest.raises(AssertionError, match="the request never came"):
        quiet.take("one", {cut: Seen()})
    assert "VERDICT: INCONCLUSIVE" in str(quiet)


def over(planned: Planned) -> None:
    """Let what is late arrive now."""
    planned.release()
    if planned.has_hit:
        eventually(lambda: planned.is_over, "the broker to answer what was late")


def read(node: KafkaNode, topic: str) -> list[str]:
    """The values that readers of committed records see once no transaction is open any more."""
    eventually(lambda: not open_transactions(node.cluster.brokers, [topic]), "the end of the last transaction")
    return texts_of(node.url, topic)


def forget(node: KafkaNode, name: str) -> None:
    """Delete the topics of a cell: a node of all cells would have thousands of partitions."""
    admin = admin_of(node.url)
    admin.delete_topics([topic for topic in admin.list_topics(timeout=PATIENCE_SECONDS).topics if name in topic])


# --- bridges --------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A transaction of the source, and the messages in it by parts."""

    kind: str
    parts: list[list[BridgedTransaction]]

    @classmethod
    def of(cls, topic: str, number: int, kind: str) -> Step:
        transactions = [
            BridgedTransaction(
                ids.to_text(ids.new_id()), "g", [PackedMessage(topic=topic, body=f"{number}{key}".encode(), key=key)]
            )
            for key in LETTERS
        ]
        return cls(kind, [transactions] if kind == BATCH else [transactions[:2], transactions[2:4], transactions[4:]])

    @property
    def texts(self) -> list[str]:
        return [bytes(m.body or b"").decode() for part in self.parts for t in part for m in t.messages]


class Source:
    """A source and its bridge: after a failure it continues from the sink's position, as a bridge does."""

    def __init__(self, url: str, name: str, kinds: Sequence[str]) -> None:
        self.name = name
        self._url = url
        self.steps = [Step.of(name, number, kind) for number, kind in enumerate(kinds)]
        self.ended: list[str] = []
        """Errors that would have ended a bridge."""
        self._epoch: int | None = None
        self._at = 0

    async def publish(self, sink: Sink, end: int, told: Callable[[], object] = lambda: None) -> None:
        """Publish up to this step. `told`: called whenever the sink has said how it went."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._at < end or self._epoch is None:
            assert time.monotonic() < deadline, f"the sink does not come to step {end} of {self.name}"
            try:
                if self._epoch is None:
                    self._epoch, position = await sink.claim(self.name)
                    self._at = int(position or 0)
                else:
                    await self._send(sink, self.steps[self._at])
                    self._at += 1
            except Unavailable:
                self._epoch = None
            except Conflict as conflict:
                self.ended.append(f"the bridge would end: {conflict}")
                self._epoch = None
            told()

    async def again(self, sink: Sink) -> None:
        """Publish the rest, as a bridge does that is started again."""
        self._epoch = None
        await self.publish(sink, len(self.steps))

    async def _send(self, sink: Sink, step: Step) -> None:
        if step.kind == BATCH:
            return await self._append(sink, transactions=step.parts[0])
        for part in step.parts:
            before = await asyncio.to_thread(self._ends)
            await self._append(sink, position="", transactions=part, prepare=True)
            await self._grown(before + len(part))
        parts = [t.id for part in step.parts for t in part]
        await self._append(sink, **{"commit" if step.kind == PARTS else "rollback": parts})

    async def _grown(self, end: int) -> None:
        with contextlib.suppress(AssertionError):  # none of it may come
            await eventually_async(lambda: self._ends() >= end, "the part", PART_SECONDS)

    def _ends(self) -> int:
        """How many records the topic has had, committed or not; the parts of a large transaction come one by one."""
        asked: Any = {TopicPartition(self.name, n): OffsetSpec.latest() for n in range(PARTITIONS)}  # type: ignore[no-untyped-call]
        answers = admin_of(self._url).list_offsets(asked).values()
        return sum(answer.result(PATIENCE_SECONDS).offset for answer in answers)

    async def _append(self, sink: Sink, *, position: str | None = None, **fields: Any) -> None:
        after = str(self._at + 1) if position is None else position
        assert self._epoch is not None
        answer = await sink.append(self.name, PackedBridgeBatch(self._epoch, str(self._at), after, **fields))
        assert not answer.refused, answer


async def through_a_sink(node: KafkaNode, cell: Cell, seen: Seen) -> None:
    name = f"s{uuid.uuid4().hex}"
    await asyncio.to_thread(make_topic, node.url, name, PARTITIONS)
    source = Source(node.url, name, [BATCH, cell.first, cell.then, BATCH])
    sink = KafkaSink(cell.url(node), CALL_SECONDS)
    about = f"notify-bridge-{name}".encode()
    if cell.request in (Api.FIND_COORDINATOR, Api.INIT_PRODUCER_ID):  # a producer's first requests
        planned = cell.plan(node, about)
    else:
        await source.publish(sink, 1)
        planned = cell.plan(node, about)
    try:
        await source.publish(sink, 2, told=planned.release if cell.point == BETWEEN else lambda: None)
        if planned.has_hit and cell.point == BETWEEN:
            await eventually_async(lambda: planned.is_over, "the broker to answer what was late")
        await source.publish(sink, 3)
        seen.note(planned)
        await asyncio.to_thread(over, planned)
        await source.publish(sink, 4)
    finally:
        seen.has_hit = planned.has_hit
        planned.release()
        await sink.close()
    sink = KafkaSink(node.url, PATIENCE_SECONDS)
    try:
        await source.again(sink)
    finally:
        await sink.close()
    seen.wrong += [Wrong(FAILED, error) for error in source.ended]
    wanted = [text for step in source.steps if step.kind != TAKEN_BACK for text in step.texts]
    never = [text for step in source.steps if step.kind == TAKEN_BACK for text in step.texts]
    seen.compare(wanted, never, await asyncio.to_thread(read, node, name))
    forget(node, name)


def through_sinks(node: KafkaNode, cells: Sequence[Cell]) -> dict[Cell, Seen]:
    """Cells of sinks, each with a source of its own."""

    async def bounded(cell: Cell, seen: Seen) -> None:
        async with asyncio.timeout(MOST_SECONDS):
            await through_a_sink(node, cell, seen)

    return beside_each_other(cells, lambda cell, seen: asyncio.run(bounded(cell, seen)))


ARRIVES_LATER = (Fault.HELD, Fault.REPEATED, Fault.LATE)
OF_A_SINK = (
    Api.FIND_COORDINATOR, Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.END_TXN,
)  # fmt: skip
POINTS: tuple[Point, ...] = (
    BETWEEN,
    (Api.ADD_PARTITIONS_TO_TXN, 1), (Api.ADD_PARTITIONS_TO_TXN, 3),
    (Api.PRODUCE, 1), (Api.PRODUCE, 3), (Api.PRODUCE, 5),
    (Api.END_TXN, 1),
)  # fmt: skip
PAIRS = [(first, then) for first in (BATCH, TAKEN_BACK) for then in (BATCH, PARTS, TAKEN_BACK)]


def can_be(request: Api, fault: Fault, point: Point) -> bool:
    """Whether a fault leaves a trace at the client. A second copy of the end or of the offsets of a transaction, of
    which the client knows nothing, counts in the next transaction, whoever sends it; but TCP delivers a request once,
    and whatever the client itself repeats is cut, held or late."""
    return fault is not Fault.REPEATED or request not in (Api.END_TXN, Api.TXN_OFFSET_COMMIT) or point == BETWEEN


def cells_of(fault: Fault, first: str, then: str) -> list[Cell]:
    points = POINTS if fault in ARRIVES_LATER else (BETWEEN,)
    places = itertools.product(OF_A_SINK, points)
    return [Cell(request, fault, point, first, then) for request, point in places if can_be(request, fault, point)]


def test_a_late_commit_or_abort_ends_no_other_transaction(node: KafkaNode, verdicts: Verdicts) -> None:
    """An ordinary batch's records were lost behind its position; of a large transaction parts were lost, doubled, or
    seen although it was rolled back."""
    late = [(BATCH, BATCH, (Api.PRODUCE, 2)), (BATCH, PARTS, (Api.PRODUCE, 3))]
    late += [(TAKEN_BACK, PARTS, (Api.ADD_PARTITIONS_TO_TXN, 4))]
    cells = [Cell(Api.END_TXN, Fault.LATE, point, first, then) for first, then, point in late]
    verdicts.take("a bridge's sink", through_sinks(node, cells))


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), PAIRS)
@pytest.mark.parametrize("fault", Fault)
def test_a_bridge_publishes_once_although_requests_are_late(
    node: KafkaNode, verdicts: Verdicts, fault: Fault, first: str, then: str
) -> None:
    verdicts.take("a bridge's sink", through_sinks(node, cells_of(fault, first, then)))


# --- consumers ------------------------------------------------------------------------------------------------

OF_A_CONSUMER = (*OF_A_SINK, Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT)
POINTS_WITH_OFFSETS: tuple[Point, ...] = (
    (Api.ADD_PARTITIONS_TO_TXN, 1), (Api.PRODUCE, 1),
    (Api.ADD_OFFSETS_TO_TXN, 1), (Api.TXN_OFFSET_COMMIT, 1), (Api.END_TXN, 1),
)  # fmt: skip


DELAY_US = SECOND_US // 10
"""How long a message waits for its releaser."""
AGAIN_SECONDS = 0.2
"""The pause of a releaser after a failure."""
_ASKING = threading.Lock()
"""One process answers all questions about groups, one by one."""


class Refusing:
    """A consumer whose handler refuses each message for good, so that each leaves with the group's progress."""

    def __init__(self, node: KafkaNode, url: str, mode: str, name: str) -> None:
        self._node, self._url, self._mode, self.name = node, url, mode, name

    def running(self) -> AbstractContextManager[None]:
        consumer = Consumer(self._url, group=self.name, instance="one")

        @consumer.subscribe(self.name, mode=self._mode, start="earliest")
        def handle(message: Any) -> None:
            raise DeadLetter("no use")

        return running(consumer)

    def send(self, texts: list[str]) -> None:
        produce(self._node.url, self.name, texts, partition=0)

    def wait(self, count: int) -> None:
        """Wait until the group has done so many. Its progress may go back, where offsets arrive late."""

        def done() -> bool:
            with _ASKING:
                at = progress(self._node.url, self.name).get((self.name, 0))
            if at is not None and at.offset >= count:
                return True
            return at is not None and len(committed(self._node.url, self.where)) >= count

        eventually(done, f"{count} messages of {self.name} to be done")

    @property
    def about(self) -> bytes:
        return transactional_id(self.name, "" if self._mode == "failover" else "one").encode()

    @property
    def where(self) -> str:
        return dead_letter_topic(self.name)


class Releasing:
    """A releaser of delayed messages, with small wheels and a group of its own."""

    def __init__(self, node: KafkaNode, url: str, mode: str, name: str) -> None:
        self._node, self._url, self.name, self.where = node, url, name, name
        self._wheels = wheels_of((("seconds", SECOND_US, 4),), f"delayed-{name}", SECOND_US)
        make_wheels(Cluster.of(node.url), self._wheels)
        self._next = self._made()
        self.about = self._next.transactional_id.encode()

    def _made(self) -> Releaser:
        return Releaser(Cluster.of(self._url), self._wheels, group=f"delays-{self.name}")

    def running(self) -> AbstractContextManager[None]:
        releaser, self._next = self._next, self._made()
        return in_background(releaser, AGAIN_SECONDS)

    def send(self, texts: list[str]) -> None:
        due_us = wall_us() + DELAY_US
        slot = self._wheels.place(due_us, wall_us())
        assert slot is not None
        headers = delayed_headers([], due_us, self.name)
        produce(self._node.url, slot.topic, texts, partition=slot.partition, headers=headers)

    def wait(self, count: int) -> None:
        eventually(lambda: len(committed(self._node.url, self.name)) >= count, f"{count} messages to be released")


class Redriving:
    """A server that sends all dead letters of a group again, each time that it is asked to."""

    def __init__(self, node: KafkaNode, url: str, mode: str, name: str) -> None:
        self._node, self.name, self.where = node, name, retry_topic(name)
        self.about = f"notify-redrive-{name}".encode()
        self._brokers = Brokers(Cluster.of(url))
        self._redriven = Redriven(self._brokers)
        for topic in (self.where, dead_letter_topic(name)):
            make_topic(node.url, topic)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield

    def send(self, texts: list[str]) -> None:
        for text in texts:
            produce(self._node.url, dead_letter_topic(self.name), [text], partition=0, headers=[(ID, text.encode())])
        eventually(self._redrive, "the redrive")

    def wait(self, count: int) -> None:
        eventually(lambda: self._redrive() and len(committed(self._node.url, self.where)) >= count, "the redrive")

    def _redrive(self) -> bool:
        """Whether the request succeeded; whoever made it repeats it otherwise."""
        try:
            self._redriven.send(self.name, list(dead_letters(self._brokers, self.name, 1, 0)))
        except (KafkaException, Unavailable):
            return False
        return True


Mover = Refusing | Releasing | Redriving


def moved_on(node: KafkaNode, cell: Cell, seen: Seen, mover: Mover) -> None:
    """A fault in the transactions of what moves records from topic to topic, and what is there in the end."""
    make_topic(node.url, mover.name)
    sent = 0

    def send(letter: str, *, waits: bool = True) -> None:
        nonlocal sent
        mover.send([f"{letter}{n}" for n in range(3)])
        sent += 3
        if waits:
            mover.wait(sent)

    is_first = cell.request in (Api.FIND_COORDINATOR, Api.INIT_PRODUCER_ID)
    planned = cell.plan(node, mover.about) if is_first else None
    with mover.running():
        if planned is None:
            send("a")
            planned = cell.plan(node, mover.about)
        try:
            send("b", waits=cell.point != BETWEEN)
            if cell.point == BETWEEN:
                eventually(lambda: planned.has_hit, "the request")
                if cell.fault is not Fault.HELD:
                    mover.wait(sent)
                over(planned)
                mover.wait(sent)
            send("c")
            seen.note(planned)
            over(planned)
            send("d")
        finally:
            seen.has_hit = planned.has_hit
            planned.release()
    with mover.running():
        send("e")
    letters = "bcde" if is_first else "abcde"
    seen.compare([f"{letter}{n}" for letter in letters for n in range(3)], [], read(node, mover.where))
    forget(node, mover.name)


def moved(node: KafkaNode, cells: Sequence[Cell], kind: type[Mover], mode: str = "") -> dict[Cell, Seen]:
    """Cells of movers of a kind, each with topics and a group of its own."""

    def one(cell: Cell, seen: Seen) -> None:
        moved_on(node, cell, seen, kind(node, cell.url(node), mode, f"m{uuid.uuid4().hex}"))

    return beside_each_other(cells, one)


def cells_of_movers(fault: Fault, requests: Sequence[Api] = OF_A_CONSUMER) -> list[Cell]:
    later = (BETWEEN, *(point for point in POINTS_WITH_OFFSETS if point[0] in requests))
    places = itertools.product(requests, later if fault in ARRIVES_LATER else (BETWEEN,))
    return [Cell(request, fault, point) for request, point in places if can_be(request, fault, point)]


SOME = [
    Cell(Api.END_TXN, Fault.LATE, (Api.PRODUCE, 1)),
    Cell(Api.TXN_OFFSET_COMMIT, Fault.LATE, (Api.END_TXN, 1)),
]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", pytest.param("failover", marks=pytest.mark.long)])
def test_a_consumer_settles_once_while_an_earlier_request_is_late(
    node: KafkaNode, verdicts: Verdicts, mode: str
) -> None:
    verdicts.take(f"a {mode} consumer", moved(node, SOME, Refusing, mode))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["shared", "failover"])
@pytest.mark.parametrize("fault", Fault)
def test_a_consumer_settles_once_although_requests_are_late(
    node: KafkaNode, verdicts: Verdicts, fault: Fault, mode: str
) -> None:
    verdicts.take(f"a {mode} consumer", moved(node, cells_of_movers(fault), Refusing, mode))


@pytest.mark.long
def test_a_releaser_releases_once_while_an_earlier_request_is_late(node: KafkaNode, verdicts: Verdicts) -> None:
    verdicts.take("a releaser", moved(node, SOME, Releasing))


@pytest.mark.long
@pytest.mark.parametrize("fault", Fault)
def test_a_releaser_releases_once_although_requests_are_late(node: KafkaNode, verdicts: Verdicts, fault: Fault) -> None:
    verdicts.take("a releaser", moved(node, cells_of_movers(fault), Releasing))


@pytest.mark.long
def test_a_server_redrives_once_while_an_earlier_request_is_late(node: KafkaNode, verdicts: Verdicts) -> None:
    verdicts.take("a redrive", moved(node, SOME[:1], Redriving))


@pytest.mark.long
@pytest.mark.parametrize("fault", Fault)
def test_a_server_redrives_once_although_requests_are_late(node: KafkaNode, verdicts: Verdicts, fault: Fault) -> None:
    verdicts.take("a redrive", moved(node, cells_of_movers(fault, OF_A_SINK), Redriving))


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [(Api.PRODUCE, 2), *(pytest.param(p, marks=pytest.mark.long) for p in ((Api.PRODUCE, 1), (Api.END_TXN, 1)))],
)
def test_refused_messages_are_sent_once_although_requests_are_late(
    node: KafkaNode, verdicts: Verdicts, unique: str, point: Point
) -> None:
    """Each message is sent in a transaction of its own, with the note that it was sent."""
    make_topic(node.url, unique)
    names = [f"{unique}-{n}" for n in range(4)]
    refuse(node.url, *[(name, unique) for name in names])
    waiting = UndeliveredList(Cluster.of(node.url))
    cell, seen = Cell(Api.END_TXN, Fault.LATE, point), Seen()
    planned = cell.plan(node, b"notify-undelivered")
    try:
        with contextlib.suppress(Unavailable):  # nothing says that none was sent
            waiting.retry(names, "the topic takes them now")
    finally:
        seen.note(planned)
        over(planned)
    waiting.retry(names, "again")
    seen.compare(names, [], read(node, unique))
    verdicts.take("the list of refused messages", {cell: seen})
    assert seen.has_met_its_point


# --- relays ---------------------------------------------------------------------------------------------------


class Outbox:
    """A database with an outbox."""

    def __init__(self, engine: sa.Engine, topic: str) -> None:
        self._engine, self._topic = engine, topic

    def add(self, texts: Sequence[str]) -> None:
        """Commit messages, each of a transaction of its own, in one transaction of the database."""
        rows = [
            {
                "transaction_id": ids.to_text(ids.new_id()), "message_no": 0, "producer_group": "g", "mode": "outbox",
                "state": "COMMITTED", "shards": "", "topic": self._topic, "key": text[-1], "relayed": 0,
                "created_at": sa.func.now(), "body": text.encode(),
            }
            for text in texts
        ]  # fmt: skip
        with self._engine.begin() as connection:
            for row in rows:
                connection.execute(half_message.insert().values(row))

    @property
    def waiting(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).where(half_message.c.relayed == 0)) or 0)


def through_a_relay(node: KafkaNode, cell: Cell, seen: Seen, database: str) -> None:
    name = f"r{uuid.uuid4().hex}"
    make_topic(node.url, name, PARTITIONS)
    engine, again, own = (make_engine(database) for _ in range(3))
    create_tables(own)
    outbox = Outbox(own, name)

    async def moved(task: asyncio.Future[Any]) -> None:
        await eventually_async(lambda: task.done() or not outbox.waiting, "everything to be moved")
        if task.done():
            task.result()

    async def run() -> None:
        task: asyncio.Future[Any] = asyncio.ensure_future(Relay(engine, cell.url(node)).run())
        planned: Planned | None = None
        try:
            for number in range(4):
                if number == 1:
                    planned = cell.plan(node, b"notify-bridge-")
                outbox.add([f"{number}{letter}" for letter in LETTERS])
                await moved(task)
                if planned is not None and (number == 2 or cell.point == BETWEEN):
                    seen.note(planned)
                    await asyncio.to_thread(over, planned)
        finally:
            if planned is not None:
                seen.has_hit = planned.has_hit
                planned.release()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        outbox.add(["4a"])
        await Relay(again, node.url).run(once=True)

    try:
        asyncio.run(run())
    finally:
        for each in (engine, again, own):
            each.dispose()
    seen.compare([f"{n}{letter}" for n in range(4) for letter in LETTERS] + ["4a"], [], read(node, name))
    forget(node, name)


RELAYED = [
    Cell(Api.END_TXN, Fault.LATE, (Api.PRODUCE, 2)),
    *(
        pytest.param(Cell(request, fault, point), marks=pytest.mark.long)
        for request, fault, point in [
            *((Api.END_TXN, Fault.LATE, point) for point in POINTS if point != (Api.PRODUCE, 2)),
            *((request, Fault.LATE, (Api.PRODUCE, 2)) for request in (Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN)),
            *itertools.product(
                (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.END_TXN), (Fault.CUT_BEFORE, Fault.CUT_AFTER), (BETWEEN,)
            ),
        ]
    ),
]


@pytest.mark.parametrize("cell", RELAYED, ids=str)
def test_a_relay_moves_once_although_requests_are_late(
    node: KafkaNode, verdicts: Verdicts, database_urls: Mapping[str, str], tmp_path: Path, cell: Cell
) -> None:
    with empty_database("postgresql", database_urls, tmp_path) as url:
        seen = beside_each_other([cell], lambda cell, seen: through_a_relay(node, cell, seen, url))
    verdicts.take("a relay", seen)
