"""Reads a whole segment of the log into columns: its messages, their settlements by groups, and its damage.

Python verifies the frames, one for each group commit; numpy gathers their entries. A half and its outcome in one
segment become one row, and settled offsets get the ids of their messages, so that Spark has to join only rows of
different segments.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from notify.protocol import ids
from notify.protocol.message import body_digest
from notify.protocol.wire import UNDECODABLE
from notify.spark.digest import hashes
from notify.spark.inputs.columns import (
    ACKS,
    ATTEMPTED,
    CHECKS,
    COMMITTED,
    MASK_GROUPS,
    MESSAGES,
    ROLLED_BACK,
    ids_of,
    list_number,
    message_rows,
    name_hash,
    origin_of,
    places,
    with_bits,
)
from notify.spark.inputs.damage import Broken, Damages, examine
from notify.spark.inputs.facts import Hole, Scanned, Sent
from notify.spark.inputs.letters import LETTERS, letter_of
from notify.storage.groups import SettleKind
from notify.storage.log import meta
from notify.storage.log.disk import Disk
from notify.storage.log.entry import ENTRY_SIZE, ENTRY_TYPE, Entry, EntryKind, each_of, table_of
from notify.storage.log.format import FRAME_HEADER_SIZE, SEGMENT_HEADER_SIZE, crc32c, read_segment_header
from notify.storage.log.records import (
    RECORD_HEADER,
    RECORD_HEADER_SIZE,
    Progressed,
    RecordType,
    check_answered,
    progressed,
    sender_bytes,
    sender_of,
)
from notify.storage.log.recovery import Damage, SegmentReader, walk
from notify.storage.log.segments import Segment


class SegmentScan:
    """Reads one segment. Raises ValueError if the file is not a segment, and OSError if the disk fails."""

    def __init__(self, disk: Disk, name: str, sealed_end: int = 0) -> None:
        """`sealed_end`: the position at which the next segment begins; 0 if the segment may grow."""
        fd = disk.open(name)
        try:
            base, created = read_segment_header(disk.read(fd, SEGMENT_HEADER_SIZE, 0))
            segment = Segment(base, name, fd, created)
            segment.sealed_end = sealed_end
            self.facts = Scanned(base, base + SEGMENT_HEADER_SIZE)
            self._damages = Damages()
            self._entries: list[bytes] = []
            self._counts: list[int] = []
            self._sources: list[int] = []
            self._digests: list[int] = []
            self._source_hashes: dict[bytes, int] = {}
            self._source_names: dict[int, str] = {}
            self._letters: list[dict[str, Any]] = []
            self._group_numbers: dict[str, int] = {}
            self._settled: list[tuple[int, int, int, int, int, int, int, int, int]] = []
            self._checks: list[tuple[bytes, int, bool, int]] = []
            damages: list[Damage] = []
            around: list[tuple[int, int]] = []
            for frame in walk(disk, segment, base, not sealed_end, damages):
                # `walk` adds a damage to the list before it returns the next frame.
                around += [(self.facts.last_us, frame.time_us)] * (len(damages) - len(around))
                self.facts.first_us = self.facts.first_us or frame.time_us
                self.facts.last_us, self.facts.end = frame.time_us, frame.end
                self.facts.durable = frame.base
                self._take(frame.body, frame.base + FRAME_HEADER_SIZE, frame.time_us)
            around += [(self.facts.last_us, 0)] * (len(damages) - len(around))
            for damage, times in zip(damages, around, strict=True):
                self._examine(disk, segment, damage, times)
        finally:
            disk.close(fd)
        # Segments with the same groups number them alike. Instances of a broadcast, which have no bit, come last.
        self._group_names = sorted(self._group_numbers, key=lambda name: ("@" in name, name))
        table = np.frombuffer(b"".join(self._entries), ENTRY_TYPE)
        sources = np.repeat(np.array(self._sources, np.int64), np.array(self._counts, np.int64))
        self._gather(table, sources, np.array(self._digests, np.int64))
        if len(table):
            self.facts.made_us = int(table["id_high"].max() >> 16) * 1000  # an id begins with 48 bits of milliseconds
        halves = table[table["kind"] == EntryKind.HALF]
        if len(halves):
            made_us = (halves["id_high"] >> 16).astype(np.int64) * 1000
            self.facts.apart_us = int(np.abs(halves["time_us"].astype(np.int64) - made_us).max())
        rows = [dict(zip(CHECKS.names, check, strict=True)) for check in self._checks]
        self.checks = pa.Table.from_pylist(rows, CHECKS)
        self.letters = pa.Table.from_pylist(self._letters, LETTERS)
        self.facts.messages, self.facts.acks = self.messages.num_rows, self.acks.num_rows
        self.facts.letters = self.letters.num_rows
        self.facts.published = pc.sum(pc.equal(self.messages["producer_group"], 0)).as_py() or 0
        self.facts.strays = (
            pc.sum(pc.and_(pc.equal(self.messages["outcome"], ROLLED_BACK), self.messages["half_us"].is_null())).as_py()
            or 0
        )
        self.facts.expired = pc.sum(pc.equal(self.acks["kind"], SettleKind.EXPIRED.value)).as_py() or 0
        self.facts.loose = pc.sum(self.acks["is_loose"]).as_py() or 0
        self.facts.unnamed = self.acks["id"].null_count
        self.facts.consumer_groups, self.facts.masked = self._group_names, with_bits(self._group_names)
        self.facts.sent = self._sent()
        self.facts.meta = thinned(self.facts.meta)
        self._damages.tell(self.facts)

    def _examine(self, disk: Disk, segment: Segment, damage: Damage, times: tuple[int, int]) -> None:
        """Examine a damaged part. `times`: the times of the frames before and after it; 0: there is no frame."""
        if damage.torn:
            return  # a server is writing it, or it is a torn tail: no client was told that it is durable
        # A frame that was read while it was being written looks damaged, too, if another frame follows: read it again.
        again = SegmentReader(disk, segment)
        position = damage.start
        while position < damage.end and (frame := again.frame_at(position)) is not None:
            self._take(frame.body, frame.base + FRAME_HEADER_SIZE, frame.time_us)
            position = frame.end
        if position >= damage.end:
            return
        damage.start = position
        data = disk.read(segment.fd, damage.end - damage.start, damage.start - segment.base)
        pieces = list(examine(data, damage.start)) if data else []
        if damage.start + len(data) < damage.end:
            missing = damage.end - damage.start - len(data)
            pieces.append(Broken(damage.start + len(data), damage.end, f"{missing} bytes are missing"))
        for broken in pieces:
            if broken.body is not None:
                self._take(memoryview(broken.body), broken.position + FRAME_HEADER_SIZE, broken.time_us)
                self.facts.end = max(self.facts.end, broken.end)
            else:
                broken.time_us = times[0] or times[1]  # the time in its own header may be wrong, too
                self._damages.add_hole(Hole(broken.position, broken.end, *times))
            self._damages.add(broken)

    def _take(self, body: memoryview, position: int, time_us: int) -> None:
        """Gather the records of a frame, up to the first malformed record, which a damaged frame may have."""
        at, end = 0, len(body)
        unpack = RECORD_HEADER.unpack_from
        while at < end:
            length, kind, _, count = unpack(body, at)
            data_at = at + RECORD_HEADER_SIZE + count * ENTRY_SIZE
            stop = at + length
            if stop > end or data_at > stop:
                return
            if count:
                self._entries.append(bytes(body[at + RECORD_HEADER_SIZE : data_at]))
                self._counts.append(count)
                self._sources.append(self._source_of(body, data_at) if kind in _WITH_PRODUCER else 0)
                if kind in _WITH_PAYLOADS:
                    self._take_payloads(self._entries[-1], body, position, (data_at, stop), time_us)
                else:
                    self._digests += [0] * count
                if kind == RecordType.DEAD_LETTER:
                    self._take_letters(self._entries[-1], body, position)
            if kind in (RecordType.PROGRESS, RecordType.DEAD_LETTER):
                for progress in progressed(kind, body[data_at:stop]):
                    self._progress(progress, time_us, position + at)
            elif kind == RecordType.CHECK:
                answer = check_answered(body[data_at:stop])
                self._checks.append((answer.id, answer.attempts, answer.parked, time_us))
            elif kind == RecordType.META:
                record = meta.plain(body[data_at:stop])
                if record[:1] not in _OF_MESSAGES:  # there may be millions, and the entries say what became of them
                    self.facts.meta.append([position + at, time_us, record])
            at = stop

    def _source_of(self, body: memoryview, at: int) -> int:
        """The hash of the database that the sender of a record names, or of NO_DATABASE; the sender is at the beginning
        of the data."""
        sender = sender_bytes(body, at)
        source_hash = self._source_hashes.get(sender)
        if source_hash is None:
            try:
                name = origin_of(sender_of(sender).source)
            except (*UNDECODABLE, ValueError):  # the frame is damaged
                name = ""
            source_hash = self._source_hashes[sender] = name_hash(name)
            self._source_names[source_hash] = name
        return source_hash

    def _take_payloads(
        self, entries: bytes, body: memoryview, position: int, data: tuple[int, int], time_us: int
    ) -> None:
        """Gather the digests of a record's payloads, and check the payloads against the checksums in their entries.

        `position`: the position of the body in the log. `data`: the beginning and end of the record's data in the body.
        """
        table = table_of(entries)
        begins = (table["position"].astype(np.int64) - position).tolist()
        sizes, checksums = table["size"].tolist(), table["payload_crc"].tolist()
        for number, (begin, size, checksum) in enumerate(zip(begins, sizes, checksums, strict=True)):
            if begin < data[0] or begin + size > data[1]:  # an entry may point to a payload of another record
                self._digests.append(0)
                continue
            payload = bytes(body[begin : begin + size])
            self._digests.append(_digest_of(payload))
            if crc32c(payload) == checksum:
                continue
            row = table[number]
            name = ids.to_text(int(row["id_high"]).to_bytes(8) + int(row["id_low"]).to_bytes(8))
            detail = "the payload's checksum is wrong, but its frame's is right: the payload was written like this"
            place = position + begin
            self._damages.add(Broken(place, place + size, detail, b"", time_us, (name, int(row["message_no"]))))

    def _take_letters(self, entries: bytes, body: memoryview, position: int) -> None:
        for entry in map(Entry.of, each_of(entries)):
            at = entry.position - position
            letter = letter_of(entry, bytes(body[at : at + entry.size])) if at >= 0 else None
            if letter is not None:
                self._letters.append(letter)

    def _sent(self) -> list[Sent]:
        """The committed messages, counted by producer group and database."""
        rows = self.messages
        has_half = pc.or_(rows["half_us"].is_valid(), rows["source"].is_valid())
        committed = rows.filter(pc.and_(pc.equal(rows["outcome"], COMMITTED), has_half))
        keys = ["source", "producer_group"]
        return [
            Sent(
                self._source_names[row["source"]] if row["source"] else "", row["producer_group"],
                row["decided_us_min"], row["decided_us_max"], row["id_count"],
            )
            for row in committed.group_by(keys).aggregate(
                [("decided_us", "min"), ("decided_us", "max"), ("id", "count")]
            ).to_pylist()
        ]  # fmt: skip

    def _progress(self, record: Progressed, time_us: int, position: int) -> None:
        topic, queue = record.topic, record.queue
        number = self._group_numbers.setdefault(record.group, len(self._group_numbers))
        if isinstance(record.what, str):  # ATTEMPTS
            for offset, attempts, *rest in record.runs:
                if len(rest) > 3 and rest[3] < 0:
                    continue  # the end of a hold, and no attempt
                self._settled.append((ATTEMPTED, number, topic, queue, offset, 1, attempts, time_us, position))
        else:
            for first, count in record.runs:
                self._settled.append((record.what, number, topic, queue, first, count, 0, time_us, position))

    def _gather(self, table: NDArray[np.void], sources: NDArray[np.int64], digests: NDArray[np.int64]) -> None:
        """Make the tables of messages and acks from the segment's entries, in log order."""
        self.messages, row_of = message_rows(table, sources, digests)
        self.acks, entry, rows = self._acks(table)
        count = self.messages.num_rows
        masks = {name: np.zeros(count, np.int64) for name in ("acked", "settled", "attempted")}
        first_us, last_us = np.zeros(count, np.int64), np.zeros(count, np.int64)
        in_masks = (entry >= 0) & (rows[:, 1] < MASK_GROUPS)
        message, kinds, groups, times = row_of[entry[in_masks]], *(rows[in_masks, column] for column in (0, 1, 7))
        for group in range(min(len(self._group_names), MASK_GROUPS)):
            of_group = groups == group
            bit = np.int64(1 << group)
            masks["acked"][message[of_group & (kinds == 0)]] |= bit
            masks["settled"][message[of_group & (kinds != ATTEMPTED)]] |= bit
            masks["attempted"][message[of_group & (kinds == ATTEMPTED)]] |= bit
        acks = kinds == 0
        # Records are in the order of their times, and the last assignment wins.
        first_us[message[acks][::-1]] = times[acks][::-1]
        last_us[message[acks]] = times[acks]
        numbers = np.full(count, list_number(self._group_names), np.int64)
        columns = {**masks, "acked_us": first_us, "last_acked_us": last_us, "groups": numbers}
        for name, values in columns.items():
            column = MESSAGES.get_field_index(name)
            array = pa.array(values, mask=values == 0)
            self.messages = self.messages.set_column(column, MESSAGES.field(column), array)
        column = ACKS.get_field_index("is_loose")
        self.acks = self.acks.set_column(column, ACKS.field(column), pa.array(~in_masks))

    def _acks(self, table: NDArray[np.void]) -> tuple[pa.Table, NDArray[np.int64], NDArray[np.int64]]:
        """The table of acks: a row for each settled or attempted offset, with its message if this segment has it.

        Also the number of each row's entry (-1: in another segment), and the rows as numbers (kind, group, …).
        """
        runs = np.array(self._settled, np.int64).reshape(-1, 9)
        if len(runs):
            numbers_of = {name: number for number, name in enumerate(self._group_names)}
            runs[:, 1] = np.array([numbers_of[name] for name in self._group_numbers])[runs[:, 1]]
        hashes = np.array([name_hash(name) for name in self._group_names], np.int64)
        counts = runs[:, 5]
        rows = np.repeat(runs, counts, axis=0)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = rows[:, 4] + within
        numbers = np.flatnonzero(table["kind"] == EntryKind.QUEUE)
        queued = table[numbers]
        rows_of_places = places(queued, rows[:, 2] << 16 | rows[:, 3], offset)
        missing = rows_of_places < 0
        hits = queued[np.where(missing, 0, rows_of_places)] if len(queued) else np.zeros(len(rows), ENTRY_TYPE)
        entry = np.where(missing, -1, numbers[np.where(missing, 0, rows_of_places)]) if len(numbers) else rows_of_places
        acks = pa.table(
            [
                ids_of(hits, missing),
                pa.array(hits["message_no"].astype(np.int32), mask=missing),
                pa.array(hashes[rows[:, 1]]),
                pa.array(rows[:, 0].astype(np.int16)),
                pa.array(rows[:, 7]),
                pa.array(hits["time_us"].astype(np.int64), mask=missing),
                pa.array(rows[:, 2]),
                pa.array(rows[:, 3].astype(np.int32)),
                pa.array(offset),
                pa.array(hits["key_hash"].view(np.int64), mask=missing),
                pa.array(rows[:, 6].astype(np.int32)),
                pa.array(rows[:, 8]),
                pa.nulls(len(rows), pa.bool_()),
            ],
            schema=ACKS,
        )
        return acks, entry, rows


_OF_MESSAGES = [[kind.__struct_config__.tag] for kind in (meta.Withdraws, meta.Dedupes)]
_WITH_PRODUCER = (RecordType.HALF, RecordType.MESSAGE)
_WITH_PAYLOADS = (*_WITH_PRODUCER, RecordType.DEAD_LETTER, RecordType.CARRY)


class _Contents(msgspec.Struct):
    """The parts of a payload that have a digest."""

    body: bytes
    key: str | None = None
    tag: str | None = None


_decode_contents = msgspec.msgpack.Decoder(_Contents).decode


def _digest_of(payload: bytes) -> int:
    """The digest of a payload's contents; 0 if the payload cannot be read."""
    try:
        contents = _decode_contents(payload)
    except UNDECODABLE:
        return 0
    return hashes.of_contents(body_digest(contents.body), contents.key, contents.tag)


_BRIDGE_MOVED = meta.BridgeMoved.__struct_config__.tag


def thinned(records: list[list[Any]]) -> list[list[Any]]:
    """META records, [position, time, plain record], with fewer records of bridges.

    In a run of records without a gap the first and the last stay, and the last then says that it follows the first. An
    audit therefore finds the same gaps, also between segments.
    """
    thin: list[list[Any]] = []
    first: dict[str, list[Any]] = {}
    last: dict[str, list[Any]] = {}
    for each in records:
        _, _, record = each
        if not record or record[0] != _BRIDGE_MOVED:
            thin.append(each)
            continue
        state = record[1]
        source = state["source"]
        before = last.get(source) or first.get(source)
        if before is None:
            first[source] = each
            continue
        previous = before[2][1]
        continues = state.get("since") == previous["position"] and state.get("epoch", 0) == previous.get("epoch", 0)
        if not continues:  # a gap, or another bridge: the records on both sides of it stay as they are
            thin += [part[source] for part in (first, last) if source in part]
            first[source] = each
            last.pop(source, None)
        elif source in last:
            last[source] = [*each[:2], [_BRIDGE_MOVED, state | {"since": previous.get("since")}]]
        else:
            last[source] = each
    return sorted([*thin, *first.values(), *last.values()], key=lambda each: int(each[0]))
