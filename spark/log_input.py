"""A server's log as tables: its segments, a Parquet copy of each, and a catalog of its topics and groups.

The segment that a server is writing to is copied each time; for the others see segments.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Corrupt, InvalidRequest
from notify.spark.catalog import Catalog, Subscribed, learn
from notify.spark.columns import ACKS, MASK_GROUPS, MESSAGES, spark_schema
from notify.spark.facts import Facts, Hole
from notify.spark.letters import LETTERS
from notify.spark.life import Groups
from notify.spark.scan import ReadOnlyDisk
from notify.spark.segments import (
    SegmentFile,
    facts_of,
    foreign_of,
    forget_others,
    has_copy,
    holes_of,
    is_locked,
    keep_copy,
    longest_unread,
    make_copy,
    segments_of,
)
from notify.spark.times import instant_text
from notify.storage.log import checkpoint, meta
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

    def __init__(self, directory: Path | str, name: str = "") -> None:
        """Raises InvalidRequest for a directory without a log, Corrupt if all checkpoints are damaged."""
        given = Path(directory)
        self.directory = given / "log" if (given / "log").is_dir() else given
        self.name = name or given.name
        self.facts: list[Facts] = []
        self.catalog = Catalog()
        if not self.directory.is_dir():
            raise InvalidRequest(f"--log {directory}: there is no such directory")
        self.segments, problems = segments_of(self.directory)
        self.problems: list[str] = problems
        """Reasons why this log proves nothing; with one of them the audit is inconclusive."""
        if not self.segments:
            raise InvalidRequest(
                f"--log {directory}: the directory has no log (no *.log files); name a server's --data-dir"
            )
        self.is_served = is_locked(self.directory / "lock")
        self.read_us = 0
        """When `prepare` began, by this machine's clock, which is also the server's."""
        self.dropped_to = 0
        """Position below which retention dropped segments, by the log's own record."""
        self.holes: list[Hole] = []
        """Parts of the log that could not be read."""
        self._copies: list[Path] = []

    # --- reading ----------------------------------------------------------------------------------------------

    def prepare(
        self, spark: SparkSession | None, scratch: Path, reread_bytes: int = EVERYTHING, given: Set[str] = frozenset()
    ) -> None:
        """Copy every segment without a copy, then read the catalog. Spark, if given, copies large logs in its tasks.

        `scratch` and the log must be the same directories for every executor. `reread_bytes`: so much of the segments
        is compared with their copies again, because bytes rot without a change of a file's size or time. `given`: the
        ids of the databases to compare with; segments of another log are left out.
        """
        self.read_us = time.time_ns() // 1000
        place = scratch / hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:16]
        place.mkdir(parents=True, exist_ok=True)
        directory, to = str(self.directory), str(place)
        copied = [s for s in self.segments if has_copy(s, place) and (s.sealed_end or not self.is_served)]
        missing = [s for s in self.segments if s not in copied]
        compared = longest_unread(copied, place, reread_bytes)
        work = sum(s.size for s in missing) + sum(s.size for s in compared) // COMPARED_BYTES
        done = _each(
            spark if work > COPIED_HERE_BYTES else None,
            [*missing, *compared],
            lambda s: (make_copy if s in missing else keep_copy)(directory, s, to),
        )
        self.problems += [problem for problem in done if problem]
        forget_others(place, {s.copy_name for s in self.segments})
        copied = [s for s in self.segments if has_copy(s, place)]
        foreign = foreign_of([facts_of(s, place) for s in copied], given)
        self.problems += [f"{segment_name(base)}: {problem}" for base, problem in foreign.items()]
        self.segments = [s for s in self.segments if s.base not in foreign]
        copied = [s for s in copied if s.base not in foreign]
        self._copies = [place / s.copy_name for s in copied]
        self.facts = [facts_of(s, place) for s in copied]
        self.holes = list(holes_of(self.facts))
        self._catalogue()
        self._look()

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
        disk = ReadOnlyDisk(self.directory)
        for name in disk.names():
            if name.endswith(".ckpt") and self.facts and int(name[:20]) > self.facts[-1].end:
                self.problems.append(f"the log ends at {self.facts[-1].end}, before its checkpoint {name}: it was cut")

    def _catalogue(self) -> None:
        catalog = self.catalog
        try:
            saved = checkpoint.load(ReadOnlyDisk(self.directory))
        except Corrupt as error:
            self.problems.append(str(error))
            saved = None
        if saved is not None:
            state = saved.state
            self.dropped_to = state.dropped_to or 0
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

    def count_from(self, span: Any) -> int:
        """The number of messages in the segments that a span of time may concern; None: all segments."""
        return sum(facts.messages for _, facts in self._written(span.start_us if span else 0))

    def apart_us(self, from_us: int) -> int:
        """The most that the time of a half, and that in its id, lie apart in segments written after an instant."""
        return max((facts.apart_us for _, facts in self._written(from_us)), default=0)

    def broken(self) -> Iterator[dict[str, Any]]:
        for facts in self.facts:
            yield from facts.broken

    def _written(self, from_us: int) -> list[tuple[Path, Facts]]:
        """The copies of segments that were written to after an instant, by the server's clock or by the ids."""
        return [
            (copy, facts)
            for copy, facts in zip(self._copies, self.facts, strict=True)
            if max(facts.last_us, facts.made_us) >= from_us
        ]

    def stored(self, spark: SparkSession, groups: Groups, from_us: int = 0) -> DataFrame | None:
        """Rows of spark.columns.MESSAGES of segments written after `from_us`, with the masks `acked0`, … of `groups`.

        None if there is no such segment.
        """
        by_groups: dict[tuple[str, ...], list[str]] = {}
        for copy, facts in self._written(from_us):
            by_groups.setdefault(tuple(facts.consumer_groups), []).append(str(copy / "messages.parquet"))
        rows: DataFrame | None = None
        for names, paths in by_groups.items():
            part = spark.read.schema(spark_schema(MESSAGES)).parquet(*paths)
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
        by_groups: dict[tuple[str, ...], list[str]] = {}
        for copy, facts in self._written(from_us):
            if facts.acks and (facts.loose or not loose_only):
                by_groups.setdefault(tuple(facts.consumer_groups), []).append(str(copy / "acks.parquet"))
        if not by_groups:
            return None
        parts: list[DataFrame] = []
        for groups, paths in by_groups.items():
            names = F.array(*[F.lit(g) for g in groups])
            part = spark.read.schema(spark_schema(ACKS)).parquet(*paths)
            parts.append(part.withColumn("group", names[F.col("consumer_group")]).drop("consumer_group"))
        whole = reduce(DataFrame.unionAll, parts)
        if loose_only:
            whole = whole.where("is_loose")
        return self._with_ids(spark, whole) if with_ids and any(f.unnamed for f in self.facts) else whole

    def _with_ids(self, spark: SparkSession, acks: DataFrame) -> DataFrame:
        """Join acks that have no id with the messages of all segments."""
        places = spark.read.schema(spark_schema(MESSAGES)).parquet(
            *[str(copy / "messages.parquet") for copy in self._copies]
        )
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
        numbers: dict[str, list[int]] = {}
        for number, name in self.catalog.topics.items():
            numbers.setdefault(name, []).append(number)  # a topic that was made again has another number
        groups: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for s in self.catalog.subscriptions.values():
            if s.mode == "broadcast" or "@" in s.group:
                continue  # no record says which instances there should be
            for number in numbers.get(s.topic, ())[-1:]:
                for queue in range(self.catalog.queues.get(number, 1)):
                    start = s.starts[queue] if queue < len(s.starts) else 0
                    start = max(start, self.catalog.trimmed.get((number, queue), 0))
                    groups.setdefault((number, queue), []).append((s.group, start))
        return groups

    def readers(self) -> dict[tuple[int, int], set[str]]:
        """For each (topic number, queue) the groups that ever subscribed to it.

        Who reads a topic of dead letters may have had any message.
        """
        of_topic: dict[str, set[str]] = {}
        of_letters: set[str] = set()
        for group, topic in self.catalog.ever:
            of_topic.setdefault(topic, set()).add(group)
            if self.catalog.kind_of(topic) == "dead_letter":
                of_letters.add(group)
        return {
            (number, queue): of_topic.get(name, set()) | of_letters
            for number, name in self.catalog.topics.items()
            for queue in range(self.catalog.queues.get(number, 1))
        }

    def inboxes(self) -> dict[str, int]:
        """The groups whose consumers have told the server of an inbox, and from when on it has rows (microseconds)."""
        told: dict[str, int] = {}
        for s in self.catalog.subscriptions.values():
            if s.inbox_from_us >= 0 and "@" not in s.group:
                told[s.group] = min(told.get(s.group, s.inbox_from_us), s.inbox_from_us)
        return told

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
        paths = [str(c / "letters.parquet") for c, f in zip(self._copies, self.facts, strict=True) if f.letters]
        return spark.read.schema(spark_schema(LETTERS)).parquet(*paths) if paths else None

    def queued_ids(self, spark: SparkSession) -> DataFrame:
        """(id): the transactions of all messages in queues."""
        paths = [str(copy / "messages.parquet") for copy in self._copies]
        return spark.read.schema(spark_schema(MESSAGES)).parquet(*paths).where("offset IS NOT NULL").select("id")

    def entries_of(self, transaction: bytes) -> dict[str, list[dict[str, Any]]]:
        """The log's rows of one transaction: rows of `messages`, `acks` (with `group`) and `checks`."""
        entries: dict[str, list[dict[str, Any]]] = {"messages": [], "acks": [], "checks": []}
        for copy in self._copies:
            for name in ("messages", "checks"):
                rows = pq.read_table(copy / f"{name}.parquet", filters=[("id", "=", transaction)]).to_pylist()
                entries[name] += rows
        places = {(m["topic"], m["queue"], m["offset"]) for m in entries["messages"] if m["offset"] is not None}
        for topic, queue, offset in sorted(places):
            wanted = [("topic", "=", topic), ("queue", "=", queue), ("offset", "=", offset)]
            for copy, facts in zip(self._copies, self.facts, strict=True):
                for row in pq.read_table(copy / "acks.parquet", filters=wanted).to_pylist():
                    entries["acks"].append(row | {"group": facts.consumer_groups[row["consumer_group"]]})
        return entries

    def messages_of(self, transactions: Collection[bytes]) -> Iterator[dict[str, Any]]:
        """The rows (id, no, source, offset, outcome, due_us) of some transactions' messages, read without Spark."""
        for copy in self._copies:
            columns = ["id", "no", "source", "offset", "outcome", "due_us"]
            wanted = [("id", "in", list(transactions))]
            yield from pq.read_table(copy / "messages.parquet", columns=columns, filters=wanted).to_pylist()

    def groups(self) -> Sequence[str]:
        """Every group that has subscribed or settled, sorted."""
        names = {s.group for s in self.catalog.subscriptions.values()}
        for facts in self.facts:
            names |= set(facts.consumer_groups)
        return sorted(names)


def _each(spark: SparkSession | None, segments: Sequence[SegmentFile], do: Callable[[SegmentFile], str]) -> list[str]:
    """Do it for each segment, in a task of Spark, if given. Returns the results."""
    if spark is None:
        return [do(segment) for segment in segments]
    return spark.sparkContext.parallelize(segments, len(segments)).map(do).collect()


def _renumbered(mask: str, names: Sequence[str], groups: Groups, block: int) -> Column:
    """A segment's mask, renumbered to the groups of all inputs."""
    known = [(n, groups.bit(name, block)) for n, name in enumerate(names[:MASK_GROUPS]) if name in groups.names]
    if all(bit in (0, 1 << n) for n, bit in known):
        kept = sum(bit for _, bit in known)
        return F.col(mask) if kept == (1 << len(names)) - 1 else F.col(mask).bitwiseAND(F.lit(kept).cast("bigint"))
    parts = [F.when(F.col(mask).bitwiseAND(F.lit(1 << n)) != 0, F.lit(bit)).otherwise(0) for n, bit in known if bit]
    return reduce(lambda a, b: a + b, parts, F.lit(0)).cast("bigint")
