"""Checkpoints: the state at a frame boundary, so that a start replays only later frames. Two or three are kept.

The structs below are the file's content. `capture` makes it from a state, `restore` makes a state from it.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from notify.errors import Corrupt
from notify.protocol.withdrawal import Dedupe, Wanted
from notify.storage import crash_point
from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Subscription
from notify.storage.holds import Hold
from notify.storage.log.dedupes import PendingOne
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_HEAD, HALF, EntryKind, tail_of
from notify.storage.log.format import crc32c
from notify.storage.log.gaps import Gap
from notify.storage.log.meta import NO_MORE_POLICIES, MorePolicies
from notify.storage.log.pending import Pending
from notify.storage.log.queues import LogTopic
from notify.storage.log.records import Sender, encode
from notify.storage.log.state import LogState
from notify.storage.log.withdrawals import Waiting
from notify.storage.progress import QueueProgress
from notify.storage.topics import Flush

_MAGIC = b"NTFYCKP1"
_HEADER_BYTES = 20
"""Magic (8), CRC32C of the body (4), length of the body (8)."""
_SUFFIX = ".ckpt"


class SavedTopic(msgspec.Struct, array_like=True, gc=False):
    number: int
    name: str
    queues: int
    deleted: bool
    retention_us: int
    flush: Flush
    more: MorePolicies = NO_MORE_POLICIES


class SavedProgress(msgspec.Struct, array_like=True, gc=False):
    group: str
    topic: int
    queue: int
    floor: int
    settled: list[tuple[int, int]]
    """Runs (first offset, count)."""
    attempts: list[tuple[int, int]]
    retry_at: list[tuple[int, int]]
    deaths: list[tuple[int, int]] = []
    interruptions: list[tuple[int, int]] = []
    held: list[tuple[int, Hold]] = []
    forgiven: list[tuple[int, tuple[int, int]]] = []


class SavedProducer(msgspec.Struct, array_like=True, gc=False):
    group: str
    source: str
    instance: str


class SavedMessage(msgspec.Struct, array_like=True, gc=False):
    topic: int
    queue: int
    flags: int
    deliver_us: int
    tail: bytes

    @classmethod
    def of(cls, entry: bytes) -> SavedMessage:
        """A half's message, by its entry."""
        flags, queue, topic, deliver_us = HALF.unpack_from(entry)
        return cls(topic, queue, flags, deliver_us, tail_of(entry))

    def entry(self, time_us: int) -> bytes:
        """The entry of the stored half."""
        return ENTRY_HEAD.pack(EntryKind.HALF, self.flags, self.queue, self.topic, time_us, 0) + self.tail


class SavedPending(msgspec.Struct, array_like=True, gc=False):
    id: bytes
    producer: int
    """Its number in `producers`."""
    stored_us: int
    next_check_us: int
    attempts: int
    parked: bool
    messages: list[SavedMessage]


class SavedState(msgspec.Struct, kw_only=True):
    topics: list[SavedTopic]
    ends: bytes
    """The next offset of each queue, topic by topic: packed u64. `starts`: the first that is retained."""
    starts: bytes
    progress: list[SavedProgress]
    producers: list[SavedProducer]
    pending: list[SavedPending]
    moved: list[tuple[int, int]]
    paused: list[str]
    bridges: list[BridgeState] = []
    bridge_bases: dict[str, str] = {}
    producer_groups: list[str]
    subscriptions: list[Subscription]
    patterns: list[Subscription]
    priorities: dict[str, Priorities]
    released: tuple[int, int]
    dropped_to: int | None = None
    """Position below which segments were dropped on purpose. None: written before that was recorded."""
    generation: int = 1
    gaps: list[tuple[int, list[Gap]]] = []
    """The gaps of each queue, by its key."""
    asked: list[tuple[bytes, int, Wanted]] = []
    """Withdrawals of undecided transactions: transaction id, message number, request."""
    waiting: list[Waiting] = []
    dedupes: list[tuple[bytes, int, Dedupe]] = []
    """Dedupe keys of undecided messages: transaction id, message number, key."""
    pending_ones: list[PendingOne] = []


class Checkpoint(msgspec.Struct):
    """The state after all records before `position`."""

    position: int
    time_us: int
    state: SavedState


_decode = msgspec.msgpack.Decoder(Checkpoint).decode


# --- files --------------------------------------------------------------------------------------------------------


def checkpoint_name(position: int) -> str:
    return f"{position:020d}{_SUFFIX}"


def encoded(state: SavedState, position: int, time_us: int) -> bytes:
    """The bytes of a checkpoint's file."""
    body = encode(Checkpoint(position, time_us, state))
    return _MAGIC + crc32c(body).to_bytes(4, "little") + len(body).to_bytes(8, "little") + body


def write(disk: Disk, data: bytes, position: int) -> None:
    """Store an encoded checkpoint durably, then drop all but the two newest, and the newest at a segment's beginning:
    with that one, finished segments can be restored elsewhere without the one that is being written."""
    crash_point.reached("checkpoint.before_rename")
    disk.replace(checkpoint_name(position), [data])
    everything = disk.names()
    names = [name for name in everything if name.endswith(_SUFFIX)]
    begun = {name.removesuffix(".log") + _SUFFIX for name in everything if name.endswith(".log")}
    kept = {*names[-2:], *[name for name in names if name in begun][-1:]}
    for name in names:
        if name not in kept:
            disk.unlink(name)


def names_behind(disk: Disk, position: int) -> list[str]:
    """Checkpoints after a position."""
    own = checkpoint_name(position)
    return [name for name in disk.names() if name.endswith(_SUFFIX) and name > own]


def load(disk: Disk) -> Checkpoint | None:
    """The newest valid checkpoint; None if the log never had one.

    Raises Corrupt if there are checkpoints and none is valid.
    """
    names = [name for name in disk.names() if name.endswith(_SUFFIX)]
    complaints = []
    for name in reversed(names):
        fd = disk.open(name)
        try:
            data = disk.read(fd, disk.size(fd), 0)
        finally:
            disk.close(fd)
        try:
            return decoded(data)
        except Corrupt as error:
            complaints.append(f"{name}: {error}")
    if complaints:
        raise Corrupt("no checkpoint can be read, restore a backup: " + "; ".join(complaints))
    return None


def decoded(data: bytes) -> Checkpoint:
    """The checkpoint of a file's bytes. Raises Corrupt."""
    body = memoryview(data)[_HEADER_BYTES:]
    if data[:8] != _MAGIC or len(body) != int.from_bytes(data[12:_HEADER_BYTES], "little"):
        raise Corrupt("cut short or not a checkpoint")
    if crc32c(bytes(body)) != int.from_bytes(data[8:12], "little"):
        raise Corrupt("damaged (checksum)")
    return _decode(body)


# --- state --------------------------------------------------------------------------------------------------------


def capture(state: LogState) -> Callable[[], SavedState]:
    """Capture the state as it is now. The returned function makes a checkpoint's content from it, in any thread.

    Everything captured is a copy, or never changes, or gets the same value again when later frames are replayed.
    """
    topics = [(t, len(t.queues), t.deleted, t.policy, t.grown) for t in state.topics_by_id.values()]
    ends = array("Q", [q.next_offset for t, *_ in topics for q in t.queues])
    starts = array("Q", [q.start for t, *_ in topics for q in t.queues])
    progress = [
        (key, p.floor, p.settled.copy(), [dict(values) for values in _by_offset(p)])
        for key, p in state.progress.items()
    ]
    pending = list(state.pending.by_id.values())
    moved = state.moved.copy()
    paused = sorted(state.paused)
    bridges = list(state.bridges.values())
    bridge_bases = state.bridge_bases.copy()
    producer_groups = list(state.producer_groups)
    subscriptions = [copy.copy(s) for s in state.subscriptions.values()]
    patterns = [copy.copy(s) for s in state.patterns.values()]
    priorities = copy.deepcopy(state.priorities)
    released = state.times.released
    dropped_to = state.dropped_to
    generation = state.generation
    gaps = [(key, list(of_queue)) for key, of_queue in state.gaps.by_key.items()]
    asked = state.withdrawals.asked.saved()
    waiting = [w for some in state.withdrawals.waiting.values() for w in some]
    dedupes, pending_ones = state.dedupes.asked.saved(), list(state.dedupes.pending.values())

    def saved() -> SavedState:
        producers, undecided = _saved_pending(pending)
        return SavedState(
            topics=[
                SavedTopic(t.id, t.name, queues, deleted, policy.retention_us, policy.flush, policy.more(grown))
                for t, queues, deleted, policy, grown in topics
            ],
            ends=_packed(ends),
            starts=_packed(starts),
            progress=[
                SavedProgress(*key, floor, list(settled), *[list(values.items()) for values in by_offset])
                for key, floor, settled, by_offset in progress
            ],
            producers=producers,
            pending=undecided,
            moved=list(moved.items()),
            paused=paused,
            bridges=bridges,
            bridge_bases=bridge_bases,
            producer_groups=producer_groups,
            subscriptions=subscriptions,
            patterns=patterns,
            priorities=priorities,
            released=released,
            dropped_to=dropped_to,
            generation=generation,
            gaps=gaps,
            asked=asked,
            waiting=waiting,
            dedupes=dedupes,
            pending_ones=pending_ones,
        )

    return saved


def restore(state: LogState, saved: SavedState) -> None:
    """Load a checkpoint into an empty state."""
    ends, starts = iter(_unpacked(saved.ends)), iter(_unpacked(saved.starts))
    for row in saved.topics:
        topic = LogTopic.numbered(row.number, row.name, row.queues)
        topic.restore(row.retention_us, row.flush, row.more)
        topic.deleted = row.deleted
        for queue in topic.queues:
            queue.next_offset = queue.visible = next(ends)
            queue.start = next(starts)
        state.topics_by_id[row.number] = topic
        if not row.deleted:
            state.topics[row.name] = topic
    state.paused = set(saved.paused)
    state.bridges = {bridge.source: bridge for bridge in saved.bridges}
    state.bridge_bases = saved.bridge_bases
    for number, name in enumerate(saved.producer_groups):
        state.set_producer_group(number, name)
    state.subscriptions = {(s.group, s.topic): s for s in saved.subscriptions}
    state.patterns = {(s.group, s.topic): s for s in saved.patterns}
    state.priorities = saved.priorities
    for row_of_group in saved.progress:
        progress = state.group_progress(row_of_group.group, row_of_group.topic, row_of_group.queue)
        progress.floor = row_of_group.floor
        progress.attempts = dict(row_of_group.attempts)
        progress.retry_at = dict(row_of_group.retry_at)
        progress.deaths = dict(row_of_group.deaths)
        progress.interruptions = dict(row_of_group.interruptions)
        progress.held = dict(row_of_group.held)
        progress.forgiven = dict(row_of_group.forgiven)
        for first, count in row_of_group.settled:
            progress.settled.add(first, count)
    # `next_check_us` of each half says when its first check is due.
    producers = [Sender(p.group, p.source, p.instance, 0) for p in saved.producers]
    for half in saved.pending:
        entries = [m.entry(half.stored_us) for m in half.messages]
        pending = Pending(half.id, producers[half.producer], entries, half.stored_us, half.next_check_us)
        pending.attempts, pending.parked = half.attempts, half.parked
        state.pending.by_id[half.id] = pending
        state.pending.schedule(pending.producer.group, half.next_check_us, (half.id,))
    state.times.released = saved.released
    state.moved = dict(saved.moved)
    state.dropped_to = saved.dropped_to or 0
    state.generation = saved.generation
    for transaction_id, number, wanted in saved.asked:
        state.withdrawals.asked.ask(transaction_id, number, wanted)
    for waiting in saved.waiting:
        state.withdrawals.add(waiting)
    for transaction_id, number, dedupe in saved.dedupes:
        state.dedupes.asked.ask(transaction_id, number, dedupe)
    for one in saved.pending_ones:
        state.dedupes.add(one)
    state.gaps.by_key = {key: [(first, count) for first, count in of_queue] for key, of_queue in saved.gaps}


def _by_offset(p: QueueProgress) -> tuple[dict[int, Any], ...]:
    """The values of single offsets, as SavedProgress has them."""
    return p.attempts, p.retry_at, p.deaths, p.interruptions, p.held, p.forgiven


def _saved_pending(undecided: list[Pending]) -> tuple[list[SavedProducer], list[SavedPending]]:
    numbers: dict[int, int] = {}
    producers: list[SavedProducer] = []
    rows: list[SavedPending] = []
    for p in undecided:
        number = numbers.get(id(p.producer))
        if number is None:
            number = numbers[id(p.producer)] = len(producers)
            producers.append(SavedProducer(p.producer.group, p.producer.source, p.producer.instance))
        messages = [SavedMessage.of(entry) for entry in p.entries]
        rows.append(SavedPending(p.id, number, p.stored_us, p.next_check_us, p.attempts, p.parked, messages))
    return producers, rows


def _packed(numbers: array[int]) -> bytes:
    return np.frombuffer(numbers, np.uint64).astype("<u8").tobytes() if numbers else b""


def _unpacked(data: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(data, "<u8").tolist()
    return numbers
