"""A server's log as tables: its segments, a Parquet copy of each, and a catalog of its topics and groups.

The segment that a server is writing to is copied each time; for the others see segments.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Sequence, Set
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Corrupt, InvalidRequest
from notify.spark.catalog import Catalog, Subscribed, learn
from notify.spark.columns import ACKS, MASK_GROUPS, MESSAGES
from notify.spark.copies import Copies, copy_name
from notify.spark.facts import Facts, Hole
from notify.spark.letters import LETTERS
from notify.spark.life import Groups
from notify.spark.log_files import LogFiles, SegmentFile
from notify.spark.places import copies_in, files_of
from notify.spark.segments import Copied, copied, foreign_of, holes_of
from notify.spark.tasks import each
from notify.spark.times import instant_text
from notify.storage.log import meta
from notify.storage.log.checkpoint import checkpoint_name
from notify.storage.log.segments import segment_name

EVERYTHING = 1 << 62
MOST_TOLD = 20
"""The most parts of a log that are named one by one."""
COPIED_HERE_BYTES = 64 << 20
"""Segments of up to so many bytes in all are copied in this process: starting workers would take longer."""
BROADCAST_ACKS = 1_000_000
"""Up to so many acks of messages in other segments are sent to every task (about 100 bytes each)."""
COMPARED_BYTES = 16
"""So many bytes are compared with their copy in the time that it takes to copy one."""


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
        self.facts: list[Facts] = []
        self.catalog = Catalog()
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
        work = sum(s.size for s in missing) + sum(s.size for s in compared) // COMPARED_BYTES
        items = [(s, None) for s in missing] + [(s, copies.facts_of(s)) for s in compared]
        made = self._each(spark if work > COPIED_HERE_BYTES else None, items)
        self.problems += [problem for problem, _ in made if problem]
        new = {copy_name(s): facts for (s, _), (_, facts) in zip(items, made, strict=True) if facts is not None}
        copies.note(new, {copy_name(s) for s in self.segments})
        there = [s for s in self.segments if copies.has(s)]
        if lost := [s for s in self.segments if copy_name(s) in new and not copies.has(s)]:
            self.problems.append(
                f"{lost[0].name} was copied by a worker, and the copy is not in {scratch}: name a directory that all "
                "workers share, or the URL of a store, with --scratch"
            )
        facts = {s.base: new.get(copy_name(s)) or copies.facts_of(s) for s in there}
        foreign = foreign_of(facts.values(), given)
        self.problems += [f"{segment_name(base)}: {problem}" for base, problem in foreign.items()]
        self.segments = [s for s in self.segments if s.base not in foreign]
        self._copied = [s for s in there if s.base not in foreign]
        self.facts = [facts[s.base] for s in self._copied]
        self.holes = list(holes_of(self.facts))
        self._catalogue()
        self._look()

    def _each(self, spark: SparkSession | None, items: Sequence[tuple[SegmentFile, Facts | None]]) -> list[Copied]:
        """Copy, or compare, each segment: in a task of Spark, if given."""
        do = partial(_copied, self.files, self.copies)
        return [do(item) for item in items] if spark is None else each(spark, items, do)

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

    def _catalogue(self) -> None:
        catalog = self.catalog
        try:
            saved = self.files.checkpoint()
        except Corrupt as error:
            self.problems.append(str(error))
            saved = None
        if saved is not None:
            state = saved.state
            self.dropped_to = max(self.dropped_to, state.dropped_to or 0)
            catalog.topics |= {topic.number: topic.name for topic in state.topics}
            catalog.queues |= {topic.number: topic.queues for topic in state.topics}
            catalog.producer_groups |= dict(enumerate(state.producer_groups))
            for s in state.subscriptions:
                key = (s.group, s.topic)
                is_filtered = bool(s.tags or s.filter)
                catalog.subscriptions[key] = Subscribed(
                    s.group, s.topic, s.mode, [], 0, s.inbox_from_us, is_filtered=is_filtered
                )
                catalog.ever.add(key)
        seen: set[tuple[str, str]] = set()
        for facts in self.facts:
            for position, time_us, record in facts.meta:
                learn(catalog, position, time_us, meta.of_plain(record), seen)

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
        """The number of messages in the segments that a span of time may concern; None: all segments."""
        return sum(facts.messages for _, facts in self._written(span.start_us if span else 0))

    def acks_from(self, from_us: int) -> int:
        """The number of rows of `acks`."""
        return sum(facts.acks for _, facts in self._written(from_us))

    def apart_us(self, from_us: int) -> int:
        """The most that the time of a half, and that in its id, lie apart in segments written after an instant."""
        return max((facts.apart_us for _, facts in self._written(from_us)), default=0)

    def broken(self) -> Iterator[dict[str, Any]]:
        for facts in self.facts:
            yield from facts.broken

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
        by_groups: dict[tuple[str, ...], list[SegmentFile]] = {}
        for segment, facts in self._written(from_us):
            by_groups.setdefault(tuple(facts.consumer_groups), []).append(segment)
        rows: DataFrame | None = None
        for names, segments in sorted(by_groups.items()):
            part = self.copies.rows(spark, "messages", MESSAGES, segments)
            for mask in ("acked", "settled", "attempted"):
                for b in range(groups.blocks):
                    part = part.withColumn(f"{mask}{b}", _renumbered(mask, names, groups, b))
            part = part.drop("acked", "settled", "attempted")
            rows = part if rows is None else rows.unionAll(part)
        return rows

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
        """Rows of spark.scan.ACKS with `group` instead of the number, and with ids from other segments.

        Without `with_ids`, acks of messages in other segments have none.
        """
        by_groups: dict[tuple[str, ...], list[SegmentFile]] = {}
        for segment, facts in self._written(from_us):
            if facts.acks and (facts.loose or not loose_only):
                by_groups.setdefault(tuple(facts.consumer_groups), []).append(segment)
        if not by_groups:
            return None
        parts: list[DataFrame] = []
        for groups, segments in sorted(by_groups.items()):
            names = F.array(*[F.lit(g) for g in groups])
            part = self.copies.rows(spark, "acks", ACKS, segments)
            parts.append(part.withColumn("group", names[F.col("consumer_group")]).drop("consumer_group"))
        whole = reduce(DataFrame.unionAll, parts)
        if loose_only:
            whole = whole.where("is_loose")
        return self._with_ids(spark, whole, from_us) if with_ids and any(f.unnamed for f in self.facts) else whole

    def _with_ids(self, spark: SparkSession, acks: DataFrame, from_us: int) -> DataFrame:
        """Join acks that have no id with the messages of segments written after `from_us`; those of older messages,
        whose ids are older too, are left out."""
        of_places = _only("topic", "queue", "offset", "id", "no", "queued_us", "key_hash")
        segments = [segment for segment, _ in self._written(from_us)]
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
        last: dict[str, dict[str, int]] = {}
        for facts in self.facts:
            for s in facts.sent:
                if s.source and s.last_us >= from_us:
                    groups = last.setdefault(s.source, {})
                    name = self.catalog.producer_groups.get(s.producer_group, "")
                    groups[name] = max(groups.get(name, 0), s.last_us)
        return last

    def letters(self, spark: SparkSession) -> DataFrame | None:
        """Rows of spark.letters.LETTERS; None if the log has no dead letter."""
        segments = [s for s, f in zip(self._copied, self.facts, strict=True) if f.letters]
        return self.copies.rows(spark, "letters", LETTERS, segments) if segments else None

    def queued_ids(self, spark: SparkSession, from_us: int = 0) -> DataFrame | None:
        """(id): the transactions of messages in queues, of segments written after `from_us`; None without one."""
        segments = [segment for segment, _ in self._written(from_us)]
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
        for topic, queue, offset in sorted(places):
            wanted = [("topic", "=", topic), ("queue", "=", queue), ("offset", "=", offset)]
            for segment, facts in zip(self._copied, self.facts, strict=True):
                for row in self.copies.read("acks", segment, filters=wanted).to_pylist():
                    entries["acks"].append(row | {"group": facts.consumer_groups[row["consumer_group"]]})
        return entries

    def messages_of(self, transactions: Collection[bytes]) -> Iterator[dict[str, Any]]:
        """The rows (id, no, source, half_us, offset, outcome, due_us) of some transactions, read without Spark."""
        columns = ["id", "no", "source", "half_us", "offset", "outcome", "due_us"]
        wanted = [("id", "in", list(transactions))]
        for segment in self._copied:
            yield from self.copies.read("messages", segment, columns=columns, filters=wanted).to_pylist()

    def groups(self) -> Sequence[str]:
        """Every group that has subscribed or settled, sorted."""
        names = {s.group for s in self.catalog.subscriptions.values()}
        for facts in self.facts:
            names |= set(facts.consumer_groups)
        return sorted(names)


def _copied(files: LogFiles, copies: Copies, item: tuple[SegmentFile, Facts | None]) -> Copied:
    return copied(files, copies, *item)


def _only(*names: str) -> pa.Schema:
    """Some columns of MESSAGES."""
    return pa.schema([MESSAGES.field(name) for name in names])


def _renumbered(mask: str, names: Sequence[str], groups: Groups, block: int) -> Column:
    """A segment's mask, renumbered to the groups of all inputs."""
    known = [(n, groups.bit(name, block)) for n, name in enumerate(names[:MASK_GROUPS]) if name in groups.names]
    if all(bit in (0, 1 << n) for n, bit in known):
        kept = sum(bit for _, bit in known)
        return F.col(mask) if kept == (1 << len(names)) - 1 else F.col(mask).bitwiseAND(F.lit(kept).cast("bigint"))
    parts = [F.when(F.col(mask).bitwiseAND(F.lit(1 << n)) != 0, F.lit(bit)).otherwise(0) for n, bit in known if bit]
    return reduce(lambda a, b: a + b, parts, F.lit(0)).cast("bigint")
