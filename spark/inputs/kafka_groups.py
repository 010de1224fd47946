"""Consumer groups over Kafka: their progress, and which messages of a partition each group takes.

A message that failed moves from its partition to the retry topic of the group, and may become a dead letter. The
offsets of a group in these topics therefore also tell what it did with a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Unavailable
from notify.kafka.admin_process import AdminProcess
from notify.kafka.cluster import Cluster
from notify.kafka.group_questions import progress_of_all
from notify.kafka.groups import DEAD_LETTER, RETRY, retry_topic
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import SUBSCRIPTIONS, Place, Subscribed
from notify.spark.judge.message_rows import Groups, mask_of
from notify.spark.small_table import small_table


@dataclass(frozen=True)
class KafkaGroups:
    """`progress`: by group and partition. `subscribed`: the subscriptions that groups recorded for their partitions."""

    progress: Mapping[str, Mapping[Place, Progress]]
    subscribed: Mapping[tuple[str, Place], Subscribed]

    @classmethod
    def of(cls, cluster: Cluster) -> KafkaGroups:
        """The present progress of all groups of a cluster. Raises Unavailable."""
        try:
            with closing(AdminProcess(cluster)) as asker:
                progress = asker.ask(progress_of_all)
        except (KafkaException, TimeoutError) as error:
            raise Unavailable(f"Kafka at {cluster.brokers}: the groups' offsets cannot be read: {error}") from error
        return cls(progress, SUBSCRIPTIONS.rows(cluster))

    def in_present_topics(self, ids: Mapping[str, str], ends: Mapping[Place, int]) -> KafkaGroups:
        """The groups as their consumers will continue: at the first record of a topic that was recreated, and of a
        partition that ends before the group's offset. `ids`: of the topics; `ends`: where partitions end."""

        def is_former(topic: str, topic_id: str) -> bool:
            return bool(topic_id) and ids.get(topic, topic_id) != topic_id

        def present(place: Place, progress: Progress) -> Progress:
            is_beyond = progress.offset > ends.get(place, progress.offset)
            return Progress(0) if is_beyond or is_former(place.topic, progress.topic) else progress

        return KafkaGroups(
            {group: {p: present(p, progress) for p, progress in of.items()} for group, of in self.progress.items()},
            {
                (group, place): (
                    msgspec.structs.replace(noted, start=0, skipped=(), passed=())
                    if is_former(place.topic, noted.topic_id)
                    else noted
                )
                for (group, place), noted in self.subscribed.items()
            },
        )

    def readers(self, topics: Sequence[str]) -> list[str]:
        """The groups that read any of these topics, without the instances of broadcasts."""
        wanted = set(topics)
        readers = (group for group, places in self.progress.items() if any(place.topic in wanted for place in places))
        return sorted(group for group in readers if "@" not in group)

    @cached_property
    def noted(self) -> frozenset[str]:
        """The groups that recorded their subscriptions."""
        return frozenset(group for group, _ in self.subscribed)

    @cached_property
    def filtered(self) -> frozenset[str]:
        """The groups whose recorded subscription has a filter, which an audit does not evaluate."""
        return frozenset(group for (group, _), subscribed in self.subscribed.items() if subscribed.filter)

    @cached_property
    def passed(self) -> dict[tuple[str, Place], tuple[tuple[int, int], ...]]:
        """The stretches (first offset, offset after the last) that commits of other programs passed over, by group and
        partition, as consumers noted them; and by the present offsets. How much of them was handled is not known."""
        noted = dict(self.subscribed)
        for group in self.noted:
            for place, progress in self.progress.get(group, {}).items():
                of_retries = Subscribed("shared", 0) if place.topic == retry_topic(group) else None
                before = noted.get((group, place), of_retries)
                if before is not None and not progress.is_own:
                    noted[group, place] = before.moved(progress.offset)
        return {key: subscribed.passed for key, subscribed in noted.items() if subscribed.passed}

    def owner_of(self, topic: str) -> tuple[str, bool] | None:
        """(group, whether the topic has dead letters) of a retry or dead-letter topic; None for another topic."""
        if topic.startswith(DEAD_LETTER):
            return topic.removeprefix(DEAD_LETTER), True
        return (topic.removeprefix(RETRY), False) if topic.startswith(RETRY) else None

    def with_progress(self, spark: SparkSession, rows: DataFrame, topics: Sequence[str], groups: Groups) -> DataFrame:
        """Rows of the source with masks of groups: `settled0`, … settled or moved the record; `taken0`, … subscribe to
        it; `attempted0`, … failed on it.

        `topics`: the names of topics, at the index that the column `topic` has.
        """
        numbers = {name: number for number, name in enumerate(topics)}
        joined = rows.join(F.broadcast(self._readers(spark, numbers, groups)), ["topic", "queue"], "left")
        joined = joined.join(
            F.broadcast(self._exceptions(spark, numbers, groups)), ["topic", "queue", "offset"], "left"
        )
        zero = F.lit(0).cast("bigint")
        for block in range(groups.blocks):
            passed = mask_of(F.filter("readers", lambda reader: F.col("offset") < reader["committed"]), block)
            takers = mask_of(F.filter("readers", _takes), block)
            joined = joined.withColumns(
                {
                    f"settled{block}": F.coalesce(passed, zero).bitwiseOR(F.coalesce(f"done{block}", zero)),
                    f"taken{block}": F.coalesce(takers, zero),
                    f"attempted{block}": F.coalesce(f"failed{block}", zero),
                }
            )
        return joined.drop("readers", *[f"{name}{b}" for name in ("done", "failed") for b in range(groups.blocks)])

    def _readers(self, spark: SparkSession, numbers: Mapping[str, int], groups: Groups) -> DataFrame:
        """(topic, queue, readers): for each partition its groups, their committed offsets and their subscriptions."""
        by_place: dict[Place, list[dict[str, Any]]] = {}
        for group, places in self.progress.items():
            for place, progress in places.items():
                if place.topic not in numbers or group not in groups.names:
                    continue
                noted = self.subscribed.get((group, place))
                is_judged = noted is not None and not noted.filter
                reader: dict[str, Any] = {"committed": progress.offset, "is_judged": is_judged}
                reader |= {"start": noted.start if noted else 0, "tags": list(noted.tags) if noted else []}
                reader |= {f"bit{b}": groups.bit(group, b) for b in range(groups.blocks)}
                by_place.setdefault(place, []).append(reader)
        fields: list[tuple[str, pa.DataType]] = [("committed", pa.int64()), ("is_judged", pa.bool_())]
        fields += [("start", pa.int64()), ("tags", pa.list_(pa.string()))]
        fields += [(f"bit{b}", pa.int64()) for b in range(groups.blocks)]
        columns = {"topic": pa.int64(), "queue": pa.int32(), "readers": pa.list_(pa.struct(fields))}
        rows = [(numbers[place.topic], place.partition, readers) for place, readers in by_place.items()]
        return small_table(spark, columns, rows)

    def _exceptions(self, spark: SparkSession, numbers: Mapping[str, int], groups: Groups) -> DataFrame:
        """(topic, queue, offset, done0, …, failed0, …): records above a group's committed offset that the group has
        settled, or on which it failed."""
        masks: dict[tuple[int, int, int], list[int]] = {}
        for group, places in self.progress.items():
            for place, progress in places.items():
                if place.topic not in numbers or group not in groups.names:
                    continue
                for shift, offsets in ((0, progress.done), (groups.blocks, progress.failed)):
                    for offset in offsets:
                        key = (numbers[place.topic], place.partition, offset)
                        mask = masks.setdefault(key, [0] * 2 * groups.blocks)
                        for block in range(groups.blocks):
                            mask[shift + block] |= groups.bit(group, block)
        columns = {"topic": pa.int64(), "queue": pa.int32(), "offset": pa.int64()}
        columns |= {f"{name}{b}": pa.int64() for name in ("done", "failed") for b in range(groups.blocks)}
        return small_table(spark, columns, [(*key, *mask) for key, mask in masks.items()])


def _takes(reader: Column) -> Column:
    """Whether the reader's subscription certainly takes the row's message, unless the message has expired."""
    is_tagged = F.coalesce(F.array_contains(reader["tags"], F.col("tag")), F.lit(False))
    has_tag = (F.size(reader["tags"]) == 0) | is_tagged
    return reader["is_judged"] & (F.col("offset") >= reader["start"]) & has_tag
