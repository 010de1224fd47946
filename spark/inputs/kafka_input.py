"""Apache Kafka as an input of an audit: its topics, their records, and the progress of consumer groups."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaException
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import InvalidRequest, Unavailable
from notify.kafka import redriven
from notify.kafka.brokers import known_topics
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS, dead_letter_topic, retry_topic
from notify.kafka.records import DELAYED, POSITIONS
from notify.kafka.subscriptions import TOPIC as SUBSCRIPTIONS
from notify.kafka.subscriptions import Place
from notify.runtime.visible import first_of
from notify.spark.inputs.catalog import Bridged
from notify.spark.inputs.changes import RESET, Left
from notify.spark.inputs.kafka_groups import KafkaGroups
from notify.spark.inputs.kafka_parts import (
    CALL_SECONDS,
    Extent,
    Part,
    Partition,
    compacted,
    cut,
    deleted,
    ends_of,
    extents,
    ids_of,
    whole_from,
)
from notify.spark.inputs.kafka_positions import positions_of
from notify.spark.inputs.kafka_rights import hidden_groups, hidden_topics
from notify.spark.inputs.kafka_source import NotifyKafkaSource, read_part
from notify.spark.judge import message_rows
from notify.spark.judge.message_rows import Groups
from notify.spark.small_table import small_table
from notify.storage.groups import Subscription

_NO_MESSAGES = (*OWN_TOPICS, "__")
_MOST_NAMED = 20


class KafkaInput:
    """The topics of one Kafka cluster. Call `prepare` first, and `release` at the end."""

    def __init__(self, url: str, topics: Sequence[str] = ()) -> None:
        """`topics`: the topics to audit; by default all except the internal topics of Kafka and of Notify."""
        self._cluster = Cluster.of(url)
        self.brokers = self._cluster.brokers
        self.name = f"kafka {self.brokers}"
        self.topics = list(topics)
        self._is_chosen = bool(topics)
        self.watermark_us = 0
        self.first_us = 0
        """The time of the oldest retained data; 0 if no record was ever deleted."""
        self.progress = KafkaGroups({}, {})
        self.bridges: list[Bridged] = []
        """The positions of bridges and relays, in the order of their records."""
        self.hidden: list[str] = []
        """Topics and groups of which nothing can be said, in sentences: hidden from this user, or compacted."""
        self.is_cut = False
        """Whether messages were published after the part that is read."""
        self._all: list[str] = []
        self._whole: dict[Partition, Extent] = {}
        self._parts: dict[Partition, Extent] = {}
        self._redriven: list[tuple[str, int, int, str]] = []
        """The dead letters in the parts read that were sent again: group, partition, offset and the letter's id."""
        self._rows: DataFrame | None = None

    def prepare(self, from_us: int = 0, until_us: int = 0) -> None:
        """List topics, groups and offsets. Only messages published in [from_us, until_us) are read; 0: no bound.

        Raises Unavailable if no broker answers, Unauthorized or Forbidden if the brokers refuse, and InvalidRequest if
        a topic is missing.
        """
        self.watermark_us = time.time_ns() // 1000
        present = sorted(known_topics(self._cluster, CALL_SECONDS))
        missing = set(self.topics) - set(present)
        if missing:
            raise InvalidRequest(f"--kafka: there is no topic {', '.join(sorted(missing))}")
        self.topics = self.topics or [topic for topic in present if not topic.startswith(_NO_MESSAGES)]
        if not self.topics:
            raise InvalidRequest(f"--kafka {self.brokers}: the cluster has no topic with messages")
        # Read the offsets of groups before the ends of topics: the parts read then have all that groups have settled.
        self.progress = KafkaGroups.of(self._cluster)
        self.hidden = [*self._hidden(present), *self._compacted()]
        further = [name for name in present if self.progress.owner_of(name) is not None or name.startswith(DELAYED)]
        self._all = [*self.topics, *(name for name in further if name not in self.topics)]
        self._whole = extents(self._cluster, self._all)
        self.progress = self._in_present_topics()
        # A message may fail, or be released, long after it was published, so the other topics are read to their ends.
        queued, other = self._split(self._whole)
        self._parts = cut(self._cluster, queued, from_us, until_us) | cut(self._cluster, other, from_us, 0)
        self._redriven = self._notes()
        self.is_cut = any(part.high < self._whole[place].high for place, part in self._parts.items())
        older = {place: extent for place, extent in queued.items() if self._parts[place].low == extent.low}
        self.first_us = whole_from(self._cluster, older, self.watermark_us)
        positions = extents(self._cluster, [topic for topic in present if topic.startswith(POSITIONS)])
        self.bridges = positions_of(self._cluster, cut(self._cluster, positions, from_us, 0))

    def _hidden(self, present: Collection[str]) -> Iterator[str]:
        """Sentences for those of the groups that subscribed, and of their topics, that this user may not see."""
        noted = {(group, place.topic) for group, place in self.progress.subscribed if "@" not in group}
        groups = {group for group, topic in noted if topic in self.topics or topic not in present}
        topics = {SUBSCRIPTIONS, redriven.TOPIC} | ({topic for _, topic in noted} if not self._is_chosen else set())
        topics |= {name for group in groups for name in (retry_topic(group), dead_letter_topic(group))}
        yield from hidden_topics(self._cluster, topics - set(present))
        yield from hidden_groups(self._cluster, groups - self.progress.progress.keys())

    def _in_present_topics(self) -> KafkaGroups:
        """The groups' progress, without offsets of former topics: they would settle messages that nobody got."""
        known = [(place, p) for places in self.progress.progress.values() for place, p in places.items()]
        noted = [(place, subscribed) for (_, place), subscribed in self.progress.subscribed.items()]
        named = {place.topic for place, p in known if p.topic} | {place.topic for place, s in noted if s.topic_id}
        read = {Place(*place): extent.high for place, extent in self._whole.items()}
        beyond = {Partition(*place) for place, p in known if p.offset > read.get(place, p.offset)}
        ends = {Place(*place): end for place, end in ends_of(self._cluster, beyond).items()}
        return self.progress.in_present_topics(ids_of(self._cluster, named & set(self._all)), ends)

    def _compacted(self) -> Iterator[str]:
        """A sentence if Kafka deletes messages of the audited topics without a trace: they would count as lost. Without
        a choice of topics, those of other programs are among them, so that only those count that a group has noted."""
        noted = {place.topic for _, place in self.progress.subscribed}
        if names := compacted(self._cluster, [name for name in self.topics if self._is_chosen or name in noted]):
            yield (
                f"Kafka compacts topics of messages, so that of a key's messages only the last stays: "
                f"{first_of(names, _MOST_NAMED)}; set their cleanup.policy to delete"
            )

    def hides(self, topics: Collection[str]) -> list[str]:
        """A sentence if this user may not see some of these topics. Raises Unavailable."""
        return list(hidden_topics(self._cluster, set(topics) - set(self._all)))

    def cluster_id(self) -> str:
        """Kafka's id of the cluster. Raises Unavailable."""
        try:
            return str(self._cluster.admin().list_topics(timeout=CALL_SECONDS).cluster_id)
        except KafkaException as error:
            raise Unavailable(f"Kafka at {self.brokers} does not answer: {error.args[0].str()}") from error

    def look_again(self) -> tuple[list[str], int]:
        """Texts that name the records deleted while they were read, and since when the topics of messages are complete.

        The instant is in microseconds since 1970; 0: no record was deleted. Raises Unavailable.
        """
        remaining = deleted(self._cluster, self._parts)
        queued, _ = self._split(remaining)
        if any(place.topic.startswith(DELAYED) for place in remaining):
            # A delayed message that was released meanwhile is after the part that is read.
            ends = extents(self._cluster, self.topics)
            self._whole |= {place: extent for place, extent in ends.items() if place in self._parts}
            self.is_cut = True
        texts = [
            f"offsets {self._parts[place].low} to {part.low - 1} of {place.topic}/{place.partition}"
            for place, part in sorted(queued.items())
        ]
        return texts, whole_from(self._cluster, queued, self.watermark_us) if queued else 0

    def _notes(self) -> list[tuple[str, int, int, str]]:
        """The notes in `notify-redriven` about the dead letters in the parts read."""
        notes = []
        for (group, spot), letter in redriven.REDRIVEN.rows(self._cluster).items():
            part = self._parts.get(Partition(dead_letter_topic(group), spot.partition))
            if part is not None and part.low <= spot.offset < part.high:
                notes.append((group, *spot, letter))
        return notes

    def _split(self, places: dict[Partition, Extent]) -> tuple[dict[Partition, Extent], dict[Partition, Extent]]:
        """The partitions of the audited topics, and the other partitions."""
        queued = {place: extent for place, extent in places.items() if place.topic in self.topics}
        return queued, {place: extent for place, extent in places.items() if place not in queued}

    def passed(self, with_inbox: Collection[str]) -> Iterator[str]:
        """Sentences about the messages in the parts read that commits of other programs passed over, so that nobody
        knows whether the group handled them. `with_inbox`: the groups whose inbox tells."""
        known = set(self.groups()) - (set(with_inbox) - self.progress.filtered)
        told: dict[tuple[str, str], list[str]] = {}
        for (group, place), stretches in sorted(self.progress.passed.items()):
            part = self._parts.get(Partition(*place), Extent(0, 0))
            for first, end in stretches if group in known else ():
                if max(first, part.low) < min(end, part.high):
                    text = f"offsets {max(first, part.low)} to {min(end, part.high) - 1} of partition {place.partition}"
                    told.setdefault((group, place.topic), []).append(text)
        for (group, topic), texts in told.items():
            yield (
                f"another program committed offsets for group {group}, and which of these messages of topic {topic} "
                f"the group handled is not known: {first_of(texts, _MOST_NAMED)}; name the database of its inbox with "
                "--database, or let it handle them again: notify group reset"
            )

    def inboxes(self) -> dict[str, int]:
        """The groups whose consumers recorded that they keep an inbox, and since when (microseconds since 1970)."""
        from_us: dict[str, int] = {}
        for (group, place), subscribed in self.progress.subscribed.items():
            inbox_from_us = subscribed.inbox_from_us
            if inbox_from_us >= 0 and place.topic in self.topics:
                from_us[group] = min(from_us.get(group, inbox_from_us), inbox_from_us)
        return from_us

    def groups(self) -> Sequence[str]:
        return self.progress.readers(self.topics)

    @property
    def count(self) -> int:
        """About how many records the audit reads."""
        return sum(part.high - part.low for part in self._parts.values())

    @property
    def partitions(self) -> int:
        """How many partitions of the audited topics the audit reads."""
        return len(self._split(self._parts)[0])

    def wanted(self) -> dict[tuple[int, int], list[tuple[str, int]]]:
        """For each (topic, partition): the groups that read it, each with the first offset that it should receive."""
        numbers = {name: number for number, name in enumerate(self.topics)}
        wanted: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for group in self.groups():
            for place in self.progress.progress[group]:
                if place.topic in numbers:
                    noted = self.progress.subscribed.get((group, place))
                    readers = wanted.setdefault((numbers[place.topic], place.partition), [])
                    readers.append((group, noted.start if noted else 0))
        return wanted

    @cached_property
    def left(self) -> dict[tuple[int, int], list[Left]]:
        """The stretches that resets skipped unsettled, by topic and partition, as consumers have noted them."""
        numbers = {name: number for number, name in enumerate(self.topics)}
        by_place: dict[tuple[int, int], list[Left]] = {}
        for (group, place), noted in self.progress.subscribed.items():
            number = numbers.get(place.topic)
            if number is None or noted.mode == "broadcast" or "@" in group:
                continue
            subscription = Subscription(group, place.topic, noted.mode, noted.tags, filter=noted.filter)
            for skipped in noted.skipped:
                by_place.setdefault((number, place.partition), []).extend(
                    Left(
                        RESET,
                        group,
                        number,
                        place.partition,
                        *run,
                        skipped.at_us,
                        skipped.at_us,
                        subscription,
                        skipped.reset,
                    )
                    for run in skipped.runs
                )
        return by_place

    def tags(self, spark: SparkSession, transactions: Collection[bytes]) -> dict[tuple[bytes, int], str | None]:
        """The tag of each message of some transactions."""
        wanted = F.broadcast(small_table(spark, {"id": pa.binary()}, [(each,) for each in transactions]))
        rows = self.queued(spark).join(wanted, "id").select("id", "no", "tag").collect()
        return {(bytes(row["id"]), row["no"]): row["tag"] for row in rows}

    def records_of(self, transaction: bytes) -> Iterator[dict[str, Any]]:
        """The rows of a transaction's records, from the source, with `place`. Reads every topic to its end."""
        for part in self._as_parts(self._whole):
            for batch in read_part(self._cluster, part):
                for row in batch.filter(pc.equal(batch["id"], transaction)).to_pylist():
                    yield row | {"place": f"{part.place}@{row['offset']}"}

    # --- tables -----------------------------------------------------------------------------------------------

    def rows(self, spark: SparkSession) -> DataFrame:
        """The records of all topics, as the source returns them; read once and held until `release`."""
        if self._rows is None:
            self._rows = self._read(spark, self._parts).persist(StorageLevel.MEMORY_AND_DISK)
        return self._rows

    def queued(self, spark: SparkSession) -> DataFrame:
        """The rows of the topics of messages."""
        return self.rows(spark).where((F.col("topic") < len(self.topics)) & F.col("id").isNotNull())

    def later(self, spark: SparkSession) -> DataFrame:
        """The rows of messages that were published after the part that is read."""
        queued, _ = self._split(self._parts)
        rest = {place: Extent(part.high, self._whole[place].high) for place, part in queued.items()}
        return self._read(spark, rest).where("id IS NOT NULL")

    def damaged(self, spark: SparkSession) -> list[dict[str, Any]]:
        """Batches of messages that fail their checksum, with the topic's `name`."""
        broken = self.rows(spark).where(F.col("damage").isNotNull()).select(
            "topic", "queue", "offset", "queued_us", "damage"
        )  # fmt: skip
        return [row.asDict() | {"name": self._all[row["topic"]]} for row in broken.collect()]

    def producer_groups(self, spark: SparkSession) -> set[str]:
        """The producer groups of the messages that are read."""
        named = self.queued(spark).where(F.col("producer_group").isNotNull())
        return {row[0] for row in named.select("producer_group").distinct().collect()}

    def messages(self, spark: SparkSession, groups: Groups, number: int) -> DataFrame:
        """Tables Q and A in the common shape of spark.judge.message_rows: the messages in topics, and the delayed
        messages."""
        failed = self._failed(spark, groups)
        done = self.progress.with_progress(spark, self.queued(spark), self._all, groups)
        joined = done.join(failed, ["id", "no"], "left")
        zero = F.lit(0).cast("bigint")
        # A message with a ttl may have expired before a group reached it.
        is_lasting = F.col("expires_us").isNull() | (F.col("expires_us") > self.watermark_us)
        for block in range(groups.blocks):
            waits, dead = F.coalesce(f"waits{block}", zero), F.coalesce(f"dead{block}", zero)
            waits = waits.bitwiseAND(F.bitwise_not(dead))
            settled = F.col(f"settled{block}").bitwiseAND(F.bitwise_not(waits))
            handled = settled.bitwiseAND(F.col(f"taken{block}")).bitwiseAND(F.bitwise_not(dead))
            joined = joined.withColumns(
                {
                    f"settled{block}": settled,
                    f"acked{block}": F.when(is_lasting, handled).otherwise(0),
                    f"attempted{block}": F.col(f"attempted{block}").bitwiseOR(F.coalesce(f"again{block}", zero)),
                }
            )
        topics = small_table(spark, {"topic": pa.int64(), "target": pa.string()}, enumerate(self.topics))
        named = joined.drop("due_us", "target").join(F.broadcast(topics), "topic")
        masks = [f"{mask}{b}" for mask in ("acked", "settled", "attempted") for b in range(groups.blocks)]
        columns = ["id", "no", "producer_group", "target", "topic", "queue", "offset", "queued_us"]
        nothing = F.lit(None).cast("bigint")
        queued = named.select(*columns, nothing.alias("due_us"), *masks)
        waiting = self._delayed(spark).select(
            *columns[:-2], nothing.alias("offset"), nothing.alias("queued_us"), "due_us",
            *[nothing.alias(mask) for mask in masks],
        )  # fmt: skip
        messages = queued.unionAll(waiting).withColumns(
            {
                "topic_hash": F.xxhash64("target"),
                "group_hash": F.when(F.col("producer_group").isNotNull(), F.xxhash64("producer_group")),
                "outcome": F.lit(1),
                "withdrawn": nothing.cast("int"),
                "origin": nothing.cast("int"),
                "digest": nothing,
                "half_us": nothing,
                "acked_us": nothing,
                "last_acked_us": nothing,
            }
        )
        return message_rows.of_messages(messages, groups, number)

    def dead(self, spark: SparkSession) -> DataFrame:
        """(id, no, group): the dead letters of groups."""
        letters = self._of_owners(spark).where("is_dead AND id IS NOT NULL")
        return letters.select("id", "no", "group").distinct()

    def letters(self, spark: SparkSession) -> DataFrame:
        """The dead letters of the audited topics that were not sent again, as rows of the source with `group`.

        Purged dead letters are not in Kafka any more.
        """
        letters = self._of_owners(spark).where("is_dead")
        if self._is_chosen:
            letters = letters.where(F.col("target").isin(self.topics))
        columns = {"group": pa.string(), "queue": pa.int32(), "offset": pa.int64(), "letter": pa.string()}
        sent = small_table(spark, columns, self._redriven)
        return letters.join(F.broadcast(sent), list(columns), "left_anti")

    def _failed(self, spark: SparkSession, groups: Groups) -> DataFrame:
        """(id, no, waits0, …, dead0, …, again0, …): masks of the groups for which a message waits for another attempt,
        is a dead letter, or had more than one attempt."""
        rows = self._of_owners(spark).where("id IS NOT NULL").join(F.broadcast(groups.table(spark)), "group")
        rows = self.progress.with_progress(spark, rows, self._all, groups)
        masks = []
        for block in range(groups.blocks):
            bit = F.col(f"bit{block}")
            is_open = ~F.col("is_dead") & (bit.bitwiseAND(F.col(f"settled{block}")) == 0)
            masks += [
                F.bit_or(F.when(is_open, bit)).alias(f"waits{block}"),
                F.bit_or(F.when(F.col("is_dead"), bit)).alias(f"dead{block}"),
                F.bit_or(F.when(F.col("attempt") > 1, bit)).alias(f"again{block}"),
            ]
        return rows.groupBy("id", "no").agg(*masks)

    def _of_owners(self, spark: SparkSession) -> DataFrame:
        """The rows of retry and dead-letter topics, with `group` and `is_dead`."""
        owners = [(number, *owner) for number, name in enumerate(self._all) if (owner := self.progress.owner_of(name))]
        kinds = small_table(spark, {"topic": pa.int64(), "group": pa.string(), "is_dead": pa.bool_()}, owners)
        return self.rows(spark).where("damage IS NULL").join(F.broadcast(kinds), "topic")

    def _delayed(self, spark: SparkSession) -> DataFrame:
        numbers = [n for n, name in enumerate(self._all) if name.startswith(DELAYED)]
        return self.rows(spark).where(F.col("topic").isin(numbers) & F.col("due_us").isNotNull())

    def release(self) -> None:
        """Free the rows that Spark holds."""
        if self._rows is not None:
            self._rows.unpersist()
            self._rows = None

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self, spark: SparkSession, places: dict[Partition, Extent]) -> DataFrame:
        spark.dataSource.register(NotifyKafkaSource)
        source = spark.read.format("notify_kafka").option("url", self._cluster.url)
        return source.option("parts", json.dumps(self._as_parts(places))).load()

    def _as_parts(self, places: dict[Partition, Extent]) -> list[Part]:
        numbers = {name: number for number, name in enumerate(self._all)}
        return [Part(place.topic, numbers[place.topic], place.partition, *part) for place, part in places.items()]
