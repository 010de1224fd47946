"""Dropping segments whose time or room is over, without losing what still waits in them.

A segment expires when each topic in it has no more use for it: its last record is older than the topic keeps messages
(counted from the commit), or newer segments hold as many bytes as the topic keeps. The server may bound the log as a
whole, too. Ids are kept for the server's retention in any case. Live
payloads are written again first: those of undecided and delayed messages, of messages that a subscribed group has not
settled, of dead letters (unless their topic has a retention of its own, or they were sent again), and of messages
committed later than their half. The way from an old position to the new one is in the
CARRY record and in every checkpoint after it. The segment goes only after such a checkpoint is durable.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from numpy.typing import NDArray

from notify.errors import Unavailable
from notify.storage import crash_point
from notify.storage.log import sealed
from notify.storage.log.format import (
    ENTRY_HEAD,
    ENTRY_SIZE,
    ENTRY_TAIL,
    RECORD_HEADER_SIZE,
    EntryKind,
    RecordType,
    crc32c,
)
from notify.storage.log.live import LivePart
from notify.storage.log.sealed import ENTRY_TYPE, SealedPart
from notify.storage.log.times import FOR_EVER_US
from notify.storage.names import DEAD_LETTER_PREFIX, redriven_id

if TYPE_CHECKING:
    from notify.storage.log.store import LogStore

log = structlog.get_logger("notify.log")

CARRY_BYTES = 4 << 20
CARRY_ENTRIES = 10_000
MOST_CARRIED_SHARE = 0.5
"""A segment with a larger share to be written again is not dropped for want of room: little room would be won."""
LETTERS_AT_ONCE = 256
MOST_HUSKS = 16

Places = dict[int, tuple[int, int]]
"""Payload position to (size, CRC32C)."""


async def retain(store: LogStore, now_us: int, default_us: int, most_bytes: int) -> int:
    """Drop every segment whose time or room is over; how many there were.

    `default_us` 0 keeps messages for ever, `most_bytes` 0 whatever room they take. What is carried is looked at by the
    next call: each ends. Raises Unavailable where the log stays above `most_bytes`, since carrying would free little.
    """
    _trim_by_size(store)
    _drop_settled_husks(store, now_us, default_us)
    await _merge_husks(store, now_us, default_us)
    dropped = 0
    newest = store.segments.last.base
    while (part := _oldest(store)) is not None and part.base < newest:
        is_due = _is_due(store, part, now_us, default_us)
        if not is_due and not (most_bytes and store.journal.end - part.base > most_bytes):
            break
        live = _live_mask(store, part, await _letters(store, part))
        if not is_due:  # there is only no room for it
            waiting = int(part.entries["size"][live].sum())
            if waiting > MOST_CARRIED_SHARE * (part.end - part.base):
                raise Unavailable(
                    f"the log takes {store.journal.end - part.base:,} bytes, its bound is {most_bytes:,}, and "
                    f"{waiting:,} of the {part.end - part.base:,} bytes of its oldest segment wait for consumers: "
                    "let them catch up, or raise retention_bytes"
                )
        await _drop(store, part, live, now_us, keep_ids=not _is_old(part, now_us, default_us))
        dropped += 1
    return dropped


def _trim_by_size(store: LogStore) -> None:
    """Topics with a bound of bytes keep their newest segments' worth of it, and what a group has not settled."""
    groups = _groups_by_topic(store)
    for topic in list(store.state.topics.values()):
        most = topic.policy.retention_bytes
        for queue in topic.queues if most else ():
            kept = 0
            start = queue.start
            for part in reversed(list(store.state.parts)):
                if kept >= most:
                    break
                first = part.first_offset(queue.key)
                if first is not None:
                    kept += part.bytes_of(queue.key)
                    start = first
            if kept < most:
                continue
            for group in groups.get(topic.id, ()):
                start = min(start, store.state.group_progress(group, topic.id, queue.number).floor)
            store.trim(topic.name, queue.number, start)


def _groups_by_topic(store: LogStore) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for (group, name), subscription in store.state.subscriptions.items():
        if subscription.mode != "broadcast":  # its instances have subscriptions of their own
            groups.setdefault(store.state.topics[name].id, []).append(group)
    return groups


def _oldest(store: LogStore) -> SealedPart | None:
    """The index of the oldest segment; None for the live one, and for one that is not sealed yet."""
    first = store.segments.all()[0]
    part = next((p for p in store.state.parts if p.base == first.base), None)
    return part if isinstance(part, SealedPart) else None


def _is_old(part: SealedPart, now_us: int, default_us: int) -> bool:
    """Whether the time for which ids are kept is over for all of a part."""
    return bool(default_us) and part.time_max + default_us <= now_us


def _is_due(store: LogStore, part: SealedPart, now_us: int, default_us: int) -> bool:
    """Whether the time of everything in a part is over."""
    if not len(part.runs) and not _is_old(part, now_us, default_us):
        return False
    return all(_is_over(store, part, run, now_us, default_us) for run in part.runs)


def _is_over(store: LogStore, part: SealedPart, run: np.void, now_us: int, default_us: int) -> bool:
    """Whether nothing of a queue's run needs to be kept for those who might still ask for it."""
    topic = store.state.topics_by_id.get(int(run["key"]) >> 16)
    if topic is None or topic.deleted:
        return True
    last = int(part.entries["offset"][int(run["first_entry"]) + int(run["count"]) - 1])
    if last < topic.queues[int(run["key"]) & 0xFFFF].start:
        return True
    keep_us = topic.policy.retention_us or default_us
    return bool(keep_us) and part.time_max + keep_us <= now_us


def _letter_runs(store: LogStore, part: SealedPart) -> Iterator[tuple[int, int]]:
    """(number of the first entry, count) of the dead letters in a part that no retention of their own bounds, and that
    nobody has purged."""
    for run in part.runs:
        topic = store.state.topics_by_id.get(int(run["key"]) >> 16)
        if topic is None or topic.deleted or topic.policy.retention_us or not topic.name.startswith(DEAD_LETTER_PREFIX):
            continue
        first, count = int(run["first_entry"]), int(run["count"])
        start = topic.queues[int(run["key"]) & 0xFFFF].start
        purged = int(np.searchsorted(part.entries["offset"][first : first + count], np.uint64(start)))
        if purged < count:
            yield first + purged, count - purged


def _is_sent_again(store: LogStore, part: SealedPart, number: int) -> bool:
    entry = part.entries[number]
    transaction_id = int(entry["id_high"]).to_bytes(8) + int(entry["id_low"]).to_bytes(8)
    topic = store.state.topics_by_id[int(entry["topic"])].name
    return store.state.outcome(redriven_id(topic, transaction_id, int(entry["offset"]))) is not None


async def _letters(store: LogStore, part: SealedPart) -> NDArray[np.bool_]:
    """Which entries of a part are dead letters that still wait to be sent again or purged."""
    mask = np.zeros(part.count, bool)
    for first, count in _letter_runs(store, part):
        for number in range(first, first + count):
            mask[number] = not _is_sent_again(store, part, number)
            if number % LETTERS_AT_ONCE == 0:
                await asyncio.sleep(0)  # there may be very many: producers and consumers have their turn
    return mask


def _has_letters(store: LogStore, part: SealedPart) -> bool:
    """Whether any dead letter of a part still waits."""
    runs = _letter_runs(store, part)
    return any(not _is_sent_again(store, part, n) for first, count in runs for n in range(first, first + count))


def _live_mask(store: LogStore, part: SealedPart, letters: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which entries of a part some subscribed group has not settled, are dead `letters`, or are still delayed."""
    mask = letters.copy()
    state = store.state
    groups = _groups_by_topic(store)
    for run in part.runs:
        topic_id, queue = int(run["key"]) >> 16, int(run["key"]) & 0xFFFF
        first, count = int(run["first_entry"]), int(run["count"])
        offsets = part.entries["offset"][first : first + count]
        for group in groups.get(topic_id, ()):
            progress = state.group_progress(group, topic_id, queue)
            start = max(progress.floor, state.topics_by_id[topic_id].queues[queue].start)
            waiting = offsets >= np.uint64(start)
            if progress.settled:
                waiting &= ~progress.settled.mask(offsets)
            mask[first : first + count] |= waiting
    mask[_delayed(store, part)] = True
    return mask


def _delayed(store: LogStore, part: SealedPart | LivePart) -> list[int]:
    """The numbers of a part's entries that wait for their time."""
    return [row[2] for row in part.delayed_after(*store.state.times.released, FOR_EVER_US, 1 << 32)]


def _husks(store: LogStore) -> list[SealedPart]:
    """Indexes of dropped segments, kept for messages that were carried, and for ids before their time; oldest first."""
    first = store.segments.all()[0].base
    return [part for part in store.state.parts if isinstance(part, SealedPart) and part.base < first]


async def _merge_husks(store: LogStore, now_us: int, default_us: int) -> None:
    """Make one of many husks: dead letters may keep one of every segment, and each takes a file that is open."""
    # Up to the first whose ids are still looked for: the one that is made of them covers all between the ends.
    husks = list(itertools.takewhile(lambda part: _is_old(part, now_us, default_us), _husks(store)))
    if len(husks) <= MOST_HUSKS:
        return
    live = [part.entries[_live_mask(store, part, await _letters(store, part))] for part in husks]
    kept, *others = husks
    data = sealed.build(np.concatenate(live).tobytes(), kept.base, husks[-1].end)
    await asyncio.to_thread(store.disk.replace, kept.name, data)
    # From here on a start passes over the others: they lie within the one that was made of them.
    store.replace_part(kept, SealedPart(store.disk, kept.name, is_fresh=True))
    for part in others:
        store.remove_part(part)
        store.disk.unlink(part.name)


def _drop_settled_husks(store: LogStore, now_us: int, default_us: int) -> None:
    for part in _husks(store):
        if not _is_old(part, now_us, default_us) or _has_letters(store, part):
            continue
        if not _live_mask(store, part, np.zeros(part.count, bool)).any():
            store.remove_part(part)
            store.disk.unlink(part.name)
            _move_starts(store, part)


async def _drop(store: LogStore, part: SealedPart, live: NDArray[np.bool_], now_us: int, keep_ids: bool) -> None:
    wanted = await _wanted(store, part, live)
    await _carry(store, wanted, now_us)
    await store.sealed_up()
    await store.checkpoint()
    if keep_ids or live.any():
        entries = part.entries.copy()
        if keep_ids:
            # Its ids are still looked for: only what was in queues is gone.
            entries["kind"][~live & (entries["kind"] == EntryKind.QUEUE)] = EntryKind.GONE
        else:
            entries = entries[live]
        data = sealed.build(entries.tobytes(), part.base, part.end)
        await asyncio.to_thread(store.disk.replace, part.name, data)
        store.replace_part(part, SealedPart(store.disk, part.name, is_fresh=True))
    else:
        store.remove_part(part)
        store.disk.unlink(part.name)
    crash_point.reached("retention.before_unlink")
    segment = store.segments.at(part.base)
    assert segment is not None
    assert segment.base == part.base
    store.segments.remove(segment)
    store.disk.sync_directory()
    _move_starts(store, part)
    log.info("segment_dropped", base=part.base, carried=len(wanted), kept_entries=int(live.sum()))


def _move_starts(store: LogStore, part: SealedPart) -> None:
    """The queues that had messages there begin later now."""
    keys = part.runs["key"].tolist()
    topics = [store.state.topics_by_id.get(key >> 16) for key in keys]
    store.state.move_starts([t.queues[key & 0xFFFF] for t, key in zip(topics, keys, strict=True) if t is not None])


async def _wanted(store: LogStore, part: SealedPart, live: NDArray[np.bool_]) -> dict[int, tuple[int, int, int]]:
    """The payloads to carry: position as it is referred to, to (where it is now, size, CRC32C)."""
    low, high = part.base, part.end
    state = store.state
    scanned = [p for p in state.parts if isinstance(p, SealedPart) and p is not part]
    places: Places = await asyncio.to_thread(_places_below, scanned, high)
    # Changes since then are in the parts that were live then, in the pending and in the delayed.
    for other in state.parts:
        if isinstance(other, LivePart) or not (other in scanned or other is part):
            places |= _below(np.frombuffer(_entries_of(other), ENTRY_TYPE), high)
    places |= _below(part.entries[live], high)
    for frame in (store.journal.in_flight, store.journal.open):
        # Decided or released, and in no part yet: the frame is on its way to the disk.
        if frame is not None and frame.entries:
            places |= _below(np.frombuffer(b"".join(frame.entries), ENTRY_TYPE), high)
    tails = [m.tail for p in state.pending.by_id.values() for m in p.messages]
    tails += [entry[24:] for _, entry in state.times.unpublished.values()]
    for other in state.parts:
        tails += [other.delayed_entry(number)[24:] for number in _delayed(store, other)]
    for tail in tails:
        position, size, _, _, _, _, _, crc, _ = ENTRY_TAIL.unpack(tail)
        if position < high:
            places[position] = (size, crc)
    state.moved = {old: new for old, new in state.moved.items() if old in places}
    wanted = {}
    for position, (size, crc) in places.items():
        now_at = position if position >= low else state.moved.get(position, position)
        if low <= now_at < high:
            wanted[position] = (now_at, size, crc)
    return wanted


def _entries_of(part: SealedPart | LivePart) -> bytes:
    return bytes(part.entries) if isinstance(part, LivePart) else part.entries.tobytes()


def _places_below(parts: Iterable[SealedPart], high: int) -> Places:
    places: Places = {}
    for part in parts:
        places |= _below(part.entries, high)
    return places


def _below(entries: NDArray[Any], high: int) -> Places:
    """Payloads below a position that queue entries point at."""
    found = entries[(entries["kind"] == EntryKind.QUEUE) & (entries["position"] < np.uint64(high))]
    pairs = zip(found["size"].tolist(), found["payload_crc"].tolist(), strict=True)
    return dict(zip(found["position"].tolist(), pairs, strict=True))


async def _carry(store: LogStore, wanted: dict[int, tuple[int, int, int]], now_us: int) -> None:
    """Write payloads again, in records of a few megabytes."""
    batch: list[tuple[int, bytes, int]] = []
    size_of_batch = 0
    for position, (now_at, size, crc) in wanted.items():
        payload = store.segments.read(now_at, size)
        if len(payload) != size or crc32c(payload) != crc:
            store.corrupt_messages += 1
            continue
        batch.append((position, payload, crc))
        size_of_batch += size
        if size_of_batch >= CARRY_BYTES or len(batch) >= CARRY_ENTRIES:
            _append(store, batch, now_us)
            batch, size_of_batch = [], 0
            await store.journal.sync()
    if batch:
        _append(store, batch, now_us)
    await store.journal.sync()


def _append(store: LogStore, batch: list[tuple[int, bytes, int]], now_us: int) -> None:
    journal = store.journal
    journal.reserve(4096 + sum(len(payload) + ENTRY_SIZE for _, payload, _ in batch))
    at = journal.end + RECORD_HEADER_SIZE + len(batch) * ENTRY_SIZE
    entries = []
    for position, payload, crc in batch:
        head = ENTRY_HEAD.pack(EntryKind.CARRY, 0, 0, 0, now_us, position)
        entries.append(head + ENTRY_TAIL.pack(at, len(payload), 0, 0, 0, bytes(16), 0, crc, 0))
        # Until the old segment is gone, reading finds the payload there: this may be said before it is durable.
        store.state.moved[position] = at
        at += len(payload)
    opened = journal.open
    journal.append(RecordType.CARRY, entries, b"".join(payload for _, payload, _ in batch))
    opened.entries += entries
    opened.queues += [None] * len(entries)
    opened.part.assigned += len(entries)
    opened.points.add("carry")
