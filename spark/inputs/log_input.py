"""A server's log as tables: its segments, a Parquet copy of each, and a catalog of its topics and groups.

The segment that a server is writing to is copied in each audit; segments.py describes the other segments.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Corrupt, InvalidRequest
from notify.spark.inputs.catalog import Catalog
from notify.spark.inputs.changes import Left
from notify.spark.inputs.columns import ACKS, MESSAGES, name_hash
from notify.spark.inputs.copies import Copies, copy_name
from notify.spark.inputs.facts import Facts, Hole
from notify.spark.inputs.find_log import copies_in, files_of
from notify.spark.inputs.letters import LETTERS
from notify.spark.inputs.log_files import SegmentFile
from notify.spark.inputs.masks import renumbered
from notify.spark.inputs.segments import Gathered, copied, foreign_of, holes_of, is_as_copied
from notify.spark.judge.message_rows import Groups
from notify.spark.tasks import each
from notify.spark.times import instant_text
from notify.storage.groups import SettleKind
from notify.storage.log.checkpoint import checkpoint_name
from notify.storage.log.segments import segment_name

EVERYTHING = 1 << 62
MOST_NAMED = 20
"""The most unreadable parts of a log that are named one by one."""
COPIED_HERE_BYTES = 64 << 20
"""Segments of at most this size together are copied in this process: starting workers would take longer."""
COPIED_AT_ONCE = 1000
"""How many segments are copied before their facts are recorded."""
BROADCAST_ACKS = 1_000_000
"""The most acks of messages in other segments that are sent to every task (about 100 bytes each)."""
COMPARED_HERE_BYTES = 16 << 30
"""Segments of at most this size together are compared with their copies in this process: reading them from memory takes
as long as starting workers."""
READERS = 4
"""How many threads of this process compare segments; they read without holding a lock."""


class LogInput:
    """The log of one data directory or store. Call `prepare` before you ask for tables."""

    def __init__(self, place: Path | str, name: str = "") -> None:
        """`place`: a data directory, or the URL of a store that a server ships to. Raises InvalidRequest if the place
        has no log, and Unavailable if the store does not answer."""
        try:
            self.files = files_of(place)
        except InvalidRequest as error:
            raise InvalidRequest(f"--log {error}") from None
        self.name = name or str(place).rstrip("/").rpartition("/")[2]
        self._gathered = Gathered(Catalog())
        # List the checkpoints before the segments: the segments then have all records before these checkpoints.
        self._checkpoints = list(self.files.checkpoints())
        self.segments, problems = self.files.segments()
        self.problems: list[str] = problems
        """Reasons why this log proves nothing; each of them makes the audit inconclusive."""
        if not self.segments:
            raise InvalidRequest(f"--log {place}: {self.files.nothing}")
        self.is_served = self.files.is_served()
        self.read_us = 0
        """When `prepare` began, by the clock of this machine, on which the server runs, too."""
        self.dropped_to = self.files.dropped_to
        """The position below which retention dropped segments, by the log's own record."""
        self.holes: list[Hole] = []
        """The parts of the log that could not be read."""
        self._copied: list[SegmentFile] = []
        self._copies: Copies | None = None

    # --- reading ----------------------------------------------------------------------------------------------

    def prepare(
        self,
        spark: SparkSession | None,
        scratch: Path | str,
        reread_bytes: int = EVERYTHING,
        sources: Set[str] = frozenset(),
    ) -> None:
        """Copy every segment without a copy, then read the catalog. With Spark, its tasks copy large logs.

        `scratch`: a directory, which must be the same for every worker, or the URL of a store. `reread_bytes`: how many
        bytes of segments are compared with their copies again, because bytes can rot while the size and the time of a
        file stay the same. `sources`: the ids of the databases of the audit; segments of another log are left out.
        """
        self.read_us = time.time_ns() // 1000
        copies = copies_in(scratch, hashlib.sha256(self.files.identity.encode()).hexdigest()[:16])
        self._copies = copies
        copied_before = [s for s in self.segments if copies.has(s) and (s.sealed_end or not self.is_served)]
        names = {copy_name(segment) for segment in copied_before}
        missing = [segment for segment in self.segments if copy_name(segment) not in names]
        compared = [] if self.files.is_immutable else copies.longest_unread(copied_before, reread_bytes)
        new_copies = self._copy(spark, missing + self._changed(spark, compared))
        if self.problems and (why := self.files.gone()):
            self.problems.append(why)
        copies.keep({copy_name(segment) for segment in self.segments})
        with_copy = [segment for segment in self.segments if copies.has(segment)]
        if lost := [s for s in self.segments if copy_name(s) in new_copies and not copies.has(s)]:
            self.problems.append(
                f"{lost[0].name} was copied by a worker, and the copy is not in {scratch}: name a directory that all "
                "workers share, or the URL of a store, with --scratch"
            )
        self._gather(with_copy, sources)
        copies.release()
        self.holes = list(holes_of(self.facts))
        self._look()

    def _changed(self, spark: SparkSession | None, compared: Sequence[SegmentFile]) -> list[SegmentFile]:
        """Compare segments with their copies. Returns the segments that differ, without their copies."""
        items = [(segment, self.copies.facts_of(segment).crc) for segment in compared]
        compare = partial(is_as_copied, self.files)
        if spark is None or sum(segment.size for segment in compared) <= COMPARED_HERE_BYTES:
            with ThreadPoolExecutor(READERS) as pool:
                same = list(pool.map(compare, items))
        else:
            same = each(spark, items, compare)
        changed = []
        for segment, is_same in zip(compared, same, strict=True):
            if is_same:
                self.copies.compared(segment)
            else:
                self.copies.forget(segment)
                changed.append(segment)
        return changed

    def _copy(self, spark: SparkSession | None, missing: Sequence[SegmentFile]) -> set[str]:
        """Copy segments, in tasks of Spark if they are large. Returns the names of the new copies."""
        copy = partial(copied, self.files, self.copies)
        is_large = sum(segment.size for segment in missing) > COPIED_HERE_BYTES
        names: set[str] = set()
        for first in range(0, len(missing), COPIED_AT_ONCE):
            part = missing[first : first + COPIED_AT_ONCE]
            results = each(spark, part, copy) if spark is not None and is_large else list(map(copy, part))
            self.problems += [problem for problem, _ in results if problem]
            new = {copy_name(s): facts for s, (_, facts) in zip(part, results, strict=True) if facts is not None}
            self.copies.note(new)
            names |= new.keys()
        return names

    def _gather(self, with_copy: list[SegmentFile], sources: Set[str]) -> None:
        """Gather the facts of the segments that have a copy, and leave out segments of another log."""
        try:
            saved = self.files.checkpoint()
        except Corrupt as error:
            self.problems.append(str(error))
            saved = None
        else:
            if saved is None and 0 < self.segments[0].base <= self.dropped_to:
                self.problems.append(
                    "the log has no checkpoint, and the segments before it were dropped: nothing says which topics and "
                    "groups there were"
                )
        if saved is not None:
            self.dropped_to = max(self.dropped_to, saved.state.dropped_to or 0)

        def gathered(segments: Iterable[SegmentFile]) -> Gathered:
            facts = Gathered(Catalog.of(saved))
            for segment in segments:
                facts.take(self.copies.facts_of(segment))
            return facts

        self._gathered = gathered(with_copy)
        if foreign := foreign_of(self._gathered.sources, sources):
            self.problems += [f"{segment_name(base)}: {problem}" for base, problem in foreign.items()]
            self.segments = [segment for segment in self.segments if segment.base not in foreign]
            with_copy = [segment for segment in with_copy if segment.base not in foreign]
            self._gathered = gathered(with_copy)
        self._gathered.sources.clear()  # they are not needed any more
        self._copied = with_copy

    @property
    def facts(self) -> list[Facts]:
        """The facts of the segments that were copied, in log order."""
        return self._gathered.facts

    @property
    def catalog(self) -> Catalog:
        return self._gathered.catalog

    @property
    def copies(self) -> Copies:
        assert self._copies is not None, "prepare comes first"
        return self._copies

    def unread(self, from_us: int) -> Iterator[str]:
        """A sentence for each missing or unreadable part of the log that may have messages from `from_us` on."""
        first = self.segments[0].base
        if first > self.dropped_to and from_us <= self.first_us:
            yield (
                f"the first segments are missing: the log begins at byte {first}, but its checkpoint says that "
                f"retention dropped only the bytes before {self.dropped_to}. If a server of an older version dropped "
                "the segments, start a server of this version once: it records how far they were dropped"
            )
        holes = [hole for hole in self.holes if not hole.to_us or hole.to_us >= from_us]
        for hole in holes[:MOST_NAMED]:
            is_in_segment = any(s.base < hole.end and hole.start < s.base + s.size for s in self.segments)
            state = "cannot be read" if is_in_segment else "are missing"
            until = f"to {instant_text(hole.to_us)}" if hole.to_us else "on"
            yield (
                f"bytes {hole.start} to {hole.end} of the log {state}: what was written from "
                f"{instant_text(hole.from_us)} {until} cannot be judged"
            )
        if len(holes) > MOST_NAMED:
            yield f"{len(holes) - MOST_NAMED} more parts of the log cannot be read"

    def _look(self) -> None:
        """Add a problem if the log ends before one of its checkpoints."""
        for position in self._checkpoints:
            if self.facts and position > self.facts[-1].end:
                name = checkpoint_name(position)
                self.problems.append(f"the log ends at {self.facts[-1].end}, before its checkpoint {name}: it was cut")

    # --- tables -----------------------------------------------------------------------------------------------

    @property
    def first_us(self) -> int:
        """The time of the oldest retained data, in microseconds since 1970; 0 if no segment was ever deleted."""
        if not self.segments or self.segments[0].base == 0:
            return 0
        return self.facts[0].first_us if self.facts else 0

    @property
    def watermark_us(self) -> int:
        """The time up to which the log is complete: now if a server has it open, else the time of its last frame."""
        if self.is_served:
            return self.read_us
        return max((facts.last_us for facts in self.facts), default=0)

    @property
    def is_shipped(self) -> bool:
        """Whether this is a shipped log: the server's own log may have further messages."""
        return self.files.is_immutable

    def count_from(self, span: Any) -> int:
        """About how many messages were stored since the start of a span; all messages if the span is None."""
        start_us = span.start_us if span else 0
        return sum(_since(facts, start_us) for _, facts in self._written(start_us))

    def acks_from(self, from_us: int) -> int:
        """The number of rows of `acks`."""
        return sum(facts.acks for _, facts in self._written(from_us))

    def apart_us(self, from_us: int) -> int:
        """The longest time between a half and the time in its id, in segments written after an instant."""
        return max((facts.apart_us for _, facts in self._written(from_us)), default=0)

    def broken(self) -> Iterator[dict[str, Any]]:
        return self._gathered.broken()

    def _written(self, from_us: int) -> list[tuple[SegmentFile, Facts]]:
        """The copied segments that were written to after an instant, by the server's clock or by the ids."""
        return [
            (segment, facts)
            for segment, facts in zip(self._copied, self.facts, strict=True)
            if max(facts.last_us, facts.made_us) >= from_us
        ]

    def stored(self, spark: SparkSession, groups: Groups, from_us: int = 0) -> DataFrame | None:
        """Rows of spark.columns.MESSAGES of segments written after `from_us`, with the masks `acked0`, … of `groups`.

        None if there is no such segment.
        """
        written = self._written(from_us)
        if not written:
            return None
        rows = self.copies.rows(spark, "messages", MESSAGES, [(s, facts.messages) for s, facts in written])
        return renumbered(spark, rows, dict.fromkeys(facts.masked for _, facts in written), groups)

    def messages(self, spark: SparkSession, groups: Groups, from_us: int = 0) -> DataFrame | None:
        """The rows of `stored`, and for a rollback whose half is in another segment a row for each of its messages."""
        rows = self.stored(spark, groups, from_us)
        if rows is None or not any(facts.strays for facts in self.facts):
            return rows
        stray = rows.where("outcome = 2 AND half_us IS NULL").select("id", "decided_us").distinct()
        alone = stray.join(
            rows.where("half_us IS NOT NULL AND no > 0").select("id", "no", "producer_group", "topic", "queue"), "id"
        )
        spread = alone.select(
            *[
                F.col(name) if name in ("id", "no", "producer_group", "topic", "queue", "decided_us")
                else F.lit(2).cast("tinyint").alias("outcome") if name == "outcome"
                else F.lit(None).cast(rows.schema[name].dataType).alias(name)
                for name in rows.columns
            ]
        )  # fmt: skip
        return rows.unionAll(spread)

    def acks(
        self, spark: SparkSession, from_us: int = 0, *, loose_only: bool = False, with_ids: bool = True
    ) -> DataFrame | None:
        """Rows of spark.columns.ACKS, with ids also for messages in other segments; None if there is no row.

        Without `with_ids`, acks of messages in other segments have no id.
        """
        written = [(s, f.acks) for s, f in self._written(from_us) if f.acks and (f.loose or not loose_only)]
        if not written:
            return None
        rows = self.copies.rows(spark, "acks", ACKS, written)
        if loose_only:
            rows = rows.where("is_loose")
        has_unnamed = any(facts.unnamed for facts in self.facts)
        return self._with_ids(spark, rows, from_us) if with_ids and has_unnamed else rows

    def _with_ids(self, spark: SparkSession, acks: DataFrame, from_us: int) -> DataFrame:
        """Join acks without an id with the messages of segments written after `from_us`.

        Acks of older messages are left out; the ids of these messages are older, too.
        """
        of_places = _only("topic", "queue", "offset", "id", "no", "queued_us", "key_hash")
        segments = [(segment, facts.messages) for segment, facts in self._written(from_us)]
        places = self.copies.rows(spark, "messages", of_places, segments)
        places = places.where("offset IS NOT NULL").select(
            "topic", "queue", "offset", F.col("id").alias("message_id"), F.col("no").alias("message_no"),
            F.col("queued_us").alias("message_us"), F.col("key_hash").alias("message_key"),
        )  # fmt: skip
        unnamed = acks.where("id IS NULL")
        # Otherwise Spark would expect as many rows as all acks, and sort every message of the log for the join.
        if sum(facts.unnamed for facts in self.facts) <= BROADCAST_ACKS:
            unnamed = F.broadcast(unnamed)
        names = {"id": "message_id", "no": "message_no", "queued_us": "message_us", "key_hash": "message_key"}
        named = unnamed.join(places, ["topic", "queue", "offset"]).select(
            *[F.col(names.get(name, name)).alias(name) for name in acks.columns]
        )
        return acks.where("id IS NOT NULL").unionAll(named)

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """See Catalog.wanted."""
        return self.catalog.wanted()

    def readers(self) -> dict[tuple[int, int], set[str]]:
        """See Catalog.readers."""
        return self.catalog.readers()

    @cached_property
    def deleted(self) -> dict[int, int]:
        """When topics were deleted, by number, in microseconds since 1970."""
        return self.catalog.changes.deleted(self.catalog.topics)

    @cached_property
    def left(self) -> dict[tuple[int, int], list[Left]]:
        """The stretches that left a queue without being settled, by topic number and queue, in log order."""
        by_queue: dict[tuple[int, int], list[Left]] = {}
        for left in self.catalog.changes.left(self.catalog.topics, self.catalog.queues):
            by_queue.setdefault((left.topic, left.queue), []).append(left)
        return by_queue

    def inboxes(self) -> dict[str, int]:
        """See Catalog.inboxes."""
        return self.catalog.inboxes()

    def sent(self, from_us: int = 0) -> dict[str, dict[str, int]]:
        """See Gathered.sent."""
        return self._gathered.sent(from_us)

    def expired(self, spark: SparkSession) -> DataFrame | None:
        """Rows of spark.columns.ACKS of messages that expired before a group settled them; None if there are none."""
        written = [(s, f.acks) for s, f in zip(self._copied, self.facts, strict=True) if f.expired]
        if not written:
            return None
        rows = self.copies.rows(spark, "acks", ACKS, written).where(F.col("kind") == SettleKind.EXPIRED.value)
        return self._with_ids(spark, rows, 0) if any(facts.unnamed for facts in self.facts) else rows

    def letters(self, spark: SparkSession) -> DataFrame | None:
        """Rows of spark.letters.LETTERS; None if the log has no dead letter."""
        pairs = zip(self._copied, self.facts, strict=True)
        segments = [(segment, facts.letters) for segment, facts in pairs if facts.letters]
        return self.copies.rows(spark, "letters", LETTERS, segments) if segments else None

    def queued_ids(self, spark: SparkSession, from_us: int = 0) -> DataFrame | None:
        """(id): the transactions of queued messages in segments written after `from_us`; None without a segment."""
        queued = self.queued(spark, from_us)
        return None if queued is None else queued.select("id")

    def queued(self, spark: SparkSession, from_us: int = 0) -> DataFrame | None:
        """(id, topic, queued_us) of the same messages."""
        segments = [(segment, facts.messages) for segment, facts in self._written(from_us)]
        if not segments:
            return None
        rows = self.copies.rows(spark, "messages", _only("id", "offset", "topic", "queued_us"), segments)
        return rows.where("offset IS NOT NULL").select("id", "topic", "queued_us")

    def entries_of(self, transaction: bytes) -> dict[str, list[dict[str, Any]]]:
        """The log's rows of one transaction: rows of `messages`, `acks` (with `group`) and `checks`."""
        entries: dict[str, list[dict[str, Any]]] = {"messages": [], "acks": [], "checks": []}
        for segment in self._copied:
            for name in ("messages", "checks"):
                entries[name] += self.copies.read(name, segment, filters=[("id", "=", transaction)]).to_pylist()
        queued = [row for row in entries["messages"] if row["offset"] is not None]
        places = {(row["topic"], row["queue"], row["offset"]) for row in queued}
        names = {name_hash(name): name for name in self._gathered.groups}
        for topic, queue, offset in sorted(places):
            wanted = [("topic", "=", topic), ("queue", "=", queue), ("offset", "=", offset)]
            for segment in self._copied:
                for row in self.copies.read("acks", segment, filters=wanted).to_pylist():
                    entries["acks"].append(row | {"group": names[row["consumer_group"]]})
        return entries

    def messages_of(self, transactions: Collection[bytes]) -> Iterator[dict[str, Any]]:
        """The rows (id, no, source, half_us, offset, outcome, due_us) of some transactions, read without Spark."""
        columns = ["id", "no", "source", "half_us", "offset", "outcome", "due_us"]
        wanted = [("id", "in", list(transactions))]
        for segment in self._copied:
            yield from self.copies.read("messages", segment, columns=columns, filters=wanted).to_pylist()

    def payloads(self, transactions: Collection[bytes]) -> Iterator[tuple[bytes, int, bytes]]:
        """Transaction, number and payload of the messages of some transactions, as far as their segments are there."""
        wanted = [("id", "in", list(transactions))]
        by_segment: dict[int, list[dict[str, Any]]] = {}
        bases = [segment.base for segment in self._copied]
        for segment in self._copied:
            columns = ["id", "no", "position", "size"]
            for row in self.copies.read("messages", segment, columns=columns, filters=wanted).to_pylist():
                by_segment.setdefault(bisect_right(bases, row["position"]) - 1, []).append(row)
        for number, rows in by_segment.items():
            if number < 0:  # retention has dropped the segment with the payload
                continue
            segment = self._copied[number]
            disk = self.files.disk(segment)
            fd = disk.open(segment.name)
            try:
                for row in rows:
                    data = disk.read(fd, row["size"], row["position"] - segment.base)
                    if len(data) == row["size"]:
                        yield row["id"], row["no"], data
            finally:
                disk.close(fd)

    def groups(self) -> Sequence[str]:
        """Every group that subscribed, or whose subscription ended, or that settled a message, sorted."""
        subscribers = {subscribed.group for subscribed in self.catalog.subscriptions.values()}
        gone = {left.group for several in self.left.values() for left in several}
        return sorted(self._gathered.groups | subscribers | gone)


def _since(facts: Facts, from_us: int) -> int:
    """About how many of a segment's messages were stored since an instant, if they were stored at a constant rate."""
    whole_us = facts.last_us - facts.first_us
    since_us = min(whole_us, max(facts.last_us, facts.made_us) - from_us)
    return facts.messages if since_us >= whole_us else -(-facts.messages * since_us // whole_us)


def _only(*names: str) -> pa.Schema:
    """Some columns of MESSAGES."""
    return pa.schema([MESSAGES.field(name) for name in names])
