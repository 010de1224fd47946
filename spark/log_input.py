"""A server's log as tables: its segments, a Parquet copy of each, and a catalog of its topics and groups.

The segment that a server is writing to is copied each time; for the others see segments.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Corrupt, InvalidRequest
from notify.spark.catalog import Catalog
from notify.spark.columns import ACKS, MESSAGES, name_hash
from notify.spark.copies import Copies, copy_name
from notify.spark.facts import Facts, Hole
from notify.spark.gathered import Gathered
from notify.spark.letters import LETTERS
from notify.spark.life import Groups
from notify.spark.log_files import SegmentFile
from notify.spark.masks import renumbered
from notify.spark.places import copies_in, files_of
from notify.spark.segments import copied, foreign_of, holes_of, is_as_copied
from notify.spark.tasks import each
from notify.spark.times import instant_text
from notify.storage.log.checkpoint import checkpoint_name
from notify.storage.log.segments import segment_name

EVERYTHING = 1 << 62
MOST_TOLD = 20
"""The most parts of a log that are named one by one."""
COPIED_HERE_BYTES = 64 << 20
"""Segments of up to so many bytes in all are copied in this process: starting workers would take longer."""
COPIED_AT_ONCE = 1000
"""So many segments are copied, and their facts noted, before the next."""
BROADCAST_ACKS = 1_000_000
"""Up to so many acks of messages in other segments are sent to every task (about 100 bytes each)."""
COMPARED_HERE_BYTES = 16 << 30
"""Segments of up to so many bytes are compared with their copies in this process: to read as many from memory takes as
long as to start workers."""
READERS = 4
"""So many segments are compared at once in this process; reading them holds no lock."""


class LogInput:
    """One data directory. Call `prepare` before the tables."""

    def __init__(self, place: Path | str, name: str = "") -> None:
        """`place`: a data directory, or the URL of a store that a server ships to. Raises InvalidRequest for a place
        without a log, Unavailable for a store that does not answer."""
        try:
            self.files = files_of(place)
        except InvalidRequest as error:
            raise InvalidRequest(f"--log {error}") from None
        self.name = name or str(place).rstrip("/").rpartition("/")[2]
        self._gathered = Gathered(Catalog())
        # Before the segments: those that are read later hold all that these checkpoints stand behind.
        self._checkpoints = list(self.files.checkpoints())
        self.segments, problems = self.files.segments()
        self.problems: list[str] = problems
        """Reasons why this log proves nothing; with one of them the audit is inconclusive."""
        if not self.segments:
            raise InvalidRequest(f"--log {place}: {self.files.nothing}")
        self.is_served = self.files.is_served()
        self.read_us = 0
        """When `prepare` began, by this machine's clock, which is also the server's."""
        self.dropped_to = self.files.dropped_to
        """Position below which retention dropped segments, by the log's own record."""
        self.holes: list[Hole] = []
        """Parts of the log that could not be read."""
        self._copied: list[SegmentFile] = []
        self._copies: Copies | None = None

    # --- reading ----------------------------------------------------------------------------------------------

    def prepare(
        self,
        spark: SparkSession | None,
        scratch: Path | str,
        reread_bytes: int = EVERYTHING,
        given: Set[str] = frozenset(),
    ) -> None:
        """Copy every segment without a copy, then read the catalog. Spark, if given, copies large logs in its tasks.

        `scratch`: a directory, which must be the same for every worker, or the URL of a store. `reread_bytes`: so much
        of the segments is compared with their copies again, because bytes rot without a change of a file's size or
        time. `given`: the ids of the databases to compare with; segments of another log are left out.
        """
        self.read_us = time.time_ns() // 1000
        copies = copies_in(scratch, hashlib.sha256(self.files.identity.encode()).hexdigest()[:16])
        self._copies = copies
        known = [s for s in self.segments if copies.has(s) and (s.sealed_end or not self.is_served)]
        names = {copy_name(s) for s in known}
        missing = [s for s in self.segments if copy_name(s) not in names]
        compared = [] if self.files.is_immutable else copies.longest_unread(known, reread_bytes)
        made = self._copy(spark, missing + self._changed(spark, compared))
        if self.problems and (why := self.files.gone()):
            self.problems.append(why)
        copies.keep({copy_name(s) for s in self.segments})
        with_copy = [s for s in self.segments if copies.has(s)]
        if lost := [s for s in self.segments if copy_name(s) in made and not copies.has(s)]:
            self.problems.append(
                f"{lost[0].name} was copied by a worker, and the copy is not in {scratch}: name a directory that all "
                "workers share, or the URL of a store, with --scratch"
            )
        self._gather(with_copy, given)
        copies.release()
        self.holes = list(holes_of(self.facts))
        self._look()

    def _changed(self, spark: SparkSession | None, compared: Sequence[SegmentFile]) -> list[SegmentFile]:
        """Compare segments with their copies. Returns those that differ, whose copies are gone."""
        items = [(s, self.copies.facts_of(s).crc) for s in compared]
        compare = partial(is_as_copied, self.files)
        if spark is None or sum(s.size for s in compared) <= COMPARED_HERE_BYTES:
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
        """Copy segments, in tasks of Spark if these are large. Returns the names of the copies that were made."""
        do = partial(copied, self.files, self.copies)
        is_large = sum(s.size for s in missing) > COPIED_HERE_BYTES
        made: set[str] = set()
        for first in range(0, len(missing), COPIED_AT_ONCE):
            some = missing[first : first + COPIED_AT_ONCE]
            results = each(spark, some, do) if spark is not None and is_large else [do(s) for s in some]
            self.problems += [problem for problem, _ in results if problem]
            new = {copy_name(s): facts for s, (_, facts) in zip(some, results, strict=True) if facts is not None}
            self.copies.note(new)
            made |= new.keys()
        return made

    def _gather(self, with_copy: list[SegmentFile], given: Set[str]) -> None:
        """Take the facts of the segments that have a copy, but for those of another log."""
        try:
            saved = self.files.checkpoint()
        except Corrupt as error:
            self.problems.append(str(error))
            saved = None
        if saved is not None:
            self.dropped_to = max(self.dropped_to, saved.state.dropped_to or 0)

        def gathered(segments: Iterable[SegmentFile]) -> Gathered:
            taken = Gathered(Catalog.of(saved))
            for segment in segments:
                taken.take(self.copies.facts_of(segment))
            return taken

        self._gathered = gathered(with_copy)
        if foreign := foreign_of(self._gathered.sources, given):
            self.problems += [f"{segment_name(base)}: {problem}" for base, problem in foreign.items()]
            self.segments = [s for s in self.segments if s.base not in foreign]
            with_copy = [s for s in with_copy if s.base not in foreign]
            self._gathered = gathered(with_copy)
        self._gathered.sources.clear()  # nothing else needs them
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
        """Which parts of the log are missing or cannot be read, of those that messages from `from_us` on may be in."""
        first = self.segments[0].base
        if first > self.dropped_to and from_us <= self.first_us:
            yield (
                f"the first segments are missing: the log begins at byte {first}, and what its checkpoint records as "
                f"dropped by retention ends at {self.dropped_to}. If a server of an older version dropped them, start "
                "one of this version once, which records it"
            )
        holes = [hole for hole in self.holes if not hole.to_us or hole.to_us >= from_us]
        for hole in holes[:MOST_TOLD]:
            here = any(s.base < hole.end and hole.start < s.base + s.size for s in self.segments)
            what = "cannot be read" if here else "are missing"
            until = f"to {instant_text(hole.to_us)}" if hole.to_us else "on"
            yield (
                f"bytes {hole.start} to {hole.end} of the log {what}: what was written from "
                f"{instant_text(hole.from_us)} {until} cannot be judged"
            )
        if len(holes) > MOST_TOLD:
            yield f"{len(holes) - MOST_TOLD} more parts of the log cannot be read"

    def _look(self) -> None:
        """Note a log that ends before its checkpoint."""
        for position in self._checkpoints:
            if self.facts and position > self.facts[-1].end:
                name = checkpoint_name(position)
                self.problems.append(f"the log ends at {self.facts[-1].end}, before its checkpoint {name}: it was cut")

    # --- tables -----------------------------------------------------------------------------------------------

    @property
    def first_us(self) -> int:
        """The time of the oldest retained data, in microseconds; 0 if no segment was ever deleted."""
        if not self.segments or self.segments[0].base == 0:
            return 0
        return self.facts[0].first_us if self.facts else 0

    @property
    def watermark_us(self) -> int:
        """The time up to which the log is complete: now while a server has it open, else that of its last frame."""
        if self.is_served:
            return self.read_us
        return max((f.last_us for f in self.facts), default=0)

    @property
    def is_shipped(self) -> bool:
        """Whether it is what a server has shipped so far: what is not in it yet may be in the server's log."""
        return self.files.is_immutable

    def count_from(self, span: Any) -> int:
        """About how many messages a span of time concerns, of those in segments that were written to since its start.
        None: all messages."""
        start_us = span.start_us if span else 0
        return sum(_since(facts, start_us) for _, facts in self._written(start_us))

    def acks_from(self, from_us: int) -> int:
        """The number of rows of `acks`."""
        return sum(facts.acks for _, facts in self._written(from_us))

    def apart_us(self, from_us: int) -> int:
        """The most that the time of a half, and that in its id, lie apart in segments written after an instant."""
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
        """The rows of `stored`; a rollback whose half is in another segment gets a row for each message."""
        rows = self.stored(spark, groups, from_us)
        if rows is None or not any(f.strays for f in self.facts):
            return rows
        stray = rows.where("outcome = 2 AND half_us IS NULL").select("id", "decided_us").distinct()
        alone = stray.join(
            rows.where("half_us IS NOT NULL AND no > 0").select("id", "no", "producer_group", "topic", "queue"), "id"
        )
        spread = alone.select(
            *[
                F.col(c) if c in ("id", "no", "producer_group", "topic", "queue", "decided_us")
                else F.lit(2).cast("tinyint").alias("outcome") if c == "outcome"
                else F.lit(None).cast(rows.schema[c].dataType).alias(c)
                for c in rows.columns
            ]
        )  # fmt: skip
        return rows.unionAll(spread)

    def acks(
        self, spark: SparkSession, from_us: int = 0, *, loose_only: bool = False, with_ids: bool = True
    ) -> DataFrame | None:
        """Rows of spark.columns.ACKS, with ids from other segments.

        Without `with_ids`, acks of messages in other segments have none.
        """
        written = [(s, f.acks) for s, f in self._written(from_us) if f.acks and (f.loose or not loose_only)]
        if not written:
            return None
        rows = self.copies.rows(spark, "acks", ACKS, written)
        if loose_only:
            rows = rows.where("is_loose")
        return self._with_ids(spark, rows, from_us) if with_ids and any(f.unnamed for f in self.facts) else rows

    def _with_ids(self, spark: SparkSession, acks: DataFrame, from_us: int) -> DataFrame:
        """Join acks that have no id with the messages of segments written after `from_us`; those of older messages,
        whose ids are older too, are left out."""
        of_places = _only("topic", "queue", "offset", "id", "no", "queued_us", "key_hash")
        segments = [(segment, facts.messages) for segment, facts in self._written(from_us)]
        places = self.copies.rows(spark, "messages", of_places, segments)
        places = places.where("offset IS NOT NULL").select(
            "topic", "queue", "offset", F.col("id").alias("message_id"), F.col("no").alias("message_no"),
            F.col("queued_us").alias("message_us"), F.col("key_hash").alias("message_key"),
        )  # fmt: skip
        unnamed = acks.where("id IS NULL")
        # Spark would take them for as many as all acks, and sort every message of the log to join them.
        if sum(f.unnamed for f in self.facts) <= BROADCAST_ACKS:
            unnamed = F.broadcast(unnamed)
        names = {"id": "message_id", "no": "message_no", "queued_us": "message_us", "key_hash": "message_key"}
        named = unnamed.join(places, ["topic", "queue", "offset"]).select(
            *[F.col(names.get(name, name)).alias(name) for name in acks.columns]
        )
        return acks.where("id IS NOT NULL").unionAll(named)

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """For each (topic number, queue) the groups that are to receive it, each with its first offset."""
        return self.catalog.wanted()

    def readers(self) -> dict[tuple[int, int], set[str]]:
        """For each (topic number, queue) the groups that ever subscribed to it."""
        return self.catalog.readers()

    def inboxes(self) -> dict[str, int]:
        """The groups whose consumers have told the server of an inbox, and from when on it has rows (microseconds)."""
        return self.catalog.inboxes()

    def sent(self, from_us: int = 0) -> dict[str, dict[str, int]]:
        """When each database's last committed message of each producer group was decided, by the database's id."""
        return self._gathered.sent(from_us)

    def letters(self, spark: SparkSession) -> DataFrame | None:
        """Rows of spark.letters.LETTERS; None if the log has no dead letter."""
        segments = [(s, f.letters) for s, f in zip(self._copied, self.facts, strict=True) if f.letters]
        return self.copies.rows(spark, "letters", LETTERS, segments) if segments else None

    def queued_ids(self, spark: SparkSession, from_us: int = 0) -> DataFrame | None:
        """(id): the transactions of messages in queues, of segments written after `from_us`; None without one."""
        segments = [(segment, facts.messages) for segment, facts in self._written(from_us)]
        if not segments:
            return None
        rows = self.copies.rows(spark, "messages", _only("id", "offset"), segments)
        return rows.where("offset IS NOT NULL").select("id")

    def entries_of(self, transaction: bytes) -> dict[str, list[dict[str, Any]]]:
        """The log's rows of one transaction: rows of `messages`, `acks` (with `group`) and `checks`."""
        entries: dict[str, list[dict[str, Any]]] = {"messages": [], "acks": [], "checks": []}
        for segment in self._copied:
            for name in ("messages", "checks"):
                entries[name] += self.copies.read(name, segment, filters=[("id", "=", transaction)]).to_pylist()
        places = {(m["topic"], m["queue"], m["offset"]) for m in entries["messages"] if m["offset"] is not None}
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

    def groups(self) -> Sequence[str]:
        """Every group that has subscribed or settled, sorted."""
        return sorted(self._gathered.groups | {s.group for s in self.catalog.subscriptions.values()})


def _since(facts: Facts, from_us: int) -> int:
    """About how many of a segment's messages were stored since an instant, as if they lay evenly in its time."""
    whole_us = facts.last_us - facts.first_us
    since_us = min(whole_us, max(facts.last_us, facts.made_us) - from_us)
    return facts.messages if since_us >= whole_us else -(-facts.messages * since_us // whole_us)


def _only(*names: str) -> pa.Schema:
    """Some columns of MESSAGES."""
    return pa.schema([MESSAGES.field(name) for name in names])
