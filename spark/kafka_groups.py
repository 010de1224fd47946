"""Consumer groups over Kafka as an audit sees them: their progress, and what each takes of which partition.

A message that failed leaves its partition for the retry topic of its group, and may end among the group's dead letters:
what a group has done with a message follows from its offsets there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.errors import Unavailable
from notify.kafka.asker import Asker
from notify.kafka.cluster import Cluster
from notify.kafka.group_questions import progress_of_all
from notify.kafka.groups import DEAD_LETTER, OLD_RETRY_SECONDS, RETRY
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place, Subscribed, read
from notify.spark.life import Groups
from notify.spark.small_table import small_table

_OLD_SUFFIXES = tuple(f".{seconds}s" for seconds in OLD_RETRY_SECONDS)


@dataclass(frozen=True)
class KafkaGroups:
    """`progress`: of each group by partition. `subscribed`: what groups noted that they take of a partition."""

    progress: Mapping[str, Mapping[Place, Progress]]
    subscribed: Mapping[tuple[str, Place], Subscribed]

    @classmethod
    def of(cls, cluster: Cluster) -> KafkaGroups:
        """All groups of a cluster, as they stand now. Raises Unavailable."""
        try:
            with closing(Asker(cluster)) as asker:
                progress = asker.ask(progress_of_all)
        except (KafkaException, TimeoutError) as error:
            raise Unavailable(f"Kafka at {cluster.brokers}: the groups' offsets cannot be read: {error}") from error
        return cls(progress, read(cluster))

    def readers(self, topics: Sequence[str]) -> list[str]:
        """The groups that read any of these topics, but for the instances of broadcasts."""
        wanted = set(topics)
        read = (g for g, places in self.progress.items() if any(p.topic in wanted for p in places))
        return sorted(group for group in read if "@" not in group)

    @cached_property
    def noted(self) -> frozenset[str]:
        """The groups that noted what they take."""
        return frozenset(group for group, _ in self.subscribed)

    @cached_property
    def filtered(self) -> frozenset[str]:
        """Those among them with a filter, which an audit does not evaluate."""
        return frozenset(group for (group, _), s in self.subscribed.items() if s.filter)

    def owner_of(self, topic: str) -> tuple[str, bool] | None:
        """(group, whether for its dead letters) of a retry or dead-letter topic; None for another topic."""
        if topic.startswith(DEAD_LETTER):
            return topic.removeprefix(DEAD_LETTER), True
        if not topic.startswith(RETRY):
            return None
        group = topic.removeprefix(RETRY)
        if group not in self.progress and group.endswith(_OLD_SUFFIXES):
            group = group.rpartition(".")[0]
        return group, False

    def with_progress(self, spark: SparkSession, rows: DataFrame, topics: Sequence[str], groups: Groups) -> DataFrame:
        """Rows of the source with masks of groups: `settled0`, … have done with the record or moved it; `taken0`, …
        subscribe to it; `attempted0`, … have failed on it.

        `topics`: the names by the number in the column `topic`.
        """
        numbers = {name: number for number, name in enumerate(topics)}
        joined = rows.join(F.broadcast(self._readers(spark, numbers, groups)), ["topic", "queue"], "left")
        joined = joined.join(
            F.broadcast(self._exceptions(spark, numbers, groups)), ["topic", "queue", "offset"], "left"
        )
        zero = F.lit(0).cast("bigint")
        for b in range(groups.blocks):
            behind = _mask(F.filter("readers", lambda r: F.col("offset") < r["committed"]), b)
            takers = _mask(F.filter("readers", _takes), b)
            joined = joined.withColumns(
                {
                    f"settled{b}": F.coalesce(behind, zero).bitwiseOR(F.coalesce(f"done{b}", zero)),
                    f"taken{b}": F.coalesce(takers, zero),
                    f"attempted{b}": F.coalesce(f"failed{b}", zero),
                }
            )
        return joined.drop("readers", *[f"{name}{b}" for name in ("done", "failed") for b in range(groups.blocks)])

    def _readers(self, spark: SparkSession, numbers: Mapping[str, int], groups: Groups) -> DataFrame:
        """(topic, queue, readers): who reads each partition, how far, and what of it."""
        by_place: dict[Place, list[dict[str, Any]]] = {}
        for group, places in self.progress.items():
            for place, progress in places.items():
                if place.topic not in numbers or group not in groups.names:
                    continue
                s = self.subscribed.get((group, place))
                reader: dict[str, Any] = {"committed": progress.offset, "is_judged": s is not None and not s.filter}
                reader |= {"start": s.start if s else 0, "tags": list(s.tags) if s else []}
                reader |= {f"bit{b}": groups.bit(group, b) for b in range(groups.blocks)}
                by_place.setdefault(place, []).append(reader)
        fields: list[tuple[str, pa.DataType]] = [("committed", pa.int64()), ("is_judged", pa.bool_())]
        fields += [("start", pa.int64()), ("tags", pa.list_(pa.string()))]
        fields += [(f"bit{b}", pa.int64()) for b in range(groups.blocks)]
        columns = {"topic": pa.int64(), "queue": pa.int32(), "readers": pa.list_(pa.struct(fields))}
        rows = [(numbers[place.topic], place.partition, readers) for place, readers in by_place.items()]
        return small_table(spark, columns, rows)

    def _exceptions(self, spark: SparkSession, numbers: Mapping[str, int], groups: Groups) -> DataFrame:
        """(topic, queue, offset, done0, …, failed0, …): records that their group has done ahead of its offset, or
        failed on."""
        masks: dict[tuple[int, int, int], list[int]] = {}
        for group, places in self.progress.items():
            for place, progress in places.items():
                if place.topic not in numbers or group not in groups.names:
                    continue
                for shift, offsets in ((0, progress.done), (groups.blocks, progress.failed)):
                    for offset in offsets:
                        key = (numbers[place.topic], place.partition, offset)
                        mask = masks.setdefault(key, [0] * 2 * groups.blocks)
                        for b in range(groups.blocks):
                            mask[shift + b] |= groups.bit(group, b)
        columns = {"topic": pa.int64(), "queue": pa.int32(), "offset": pa.int64()}
        columns |= {f"{name}{b}": pa.int64() for name in ("done", "failed") for b in range(groups.blocks)}
        return small_table(spark, columns, [(*key, *mask) for key, mask in masks.items()])


def _takes(reader: Column) -> Column:
    """Whether a reader's subscription certainly takes the row's message, unless that has expired."""
    is_tagged = F.coalesce(F.array_contains(reader["tags"], F.col("tag")), F.lit(False))
    has_tag = (F.size(reader["tags"]) == 0) | is_tagged
    return reader["is_judged"] & (F.col("offset") >= reader["start"]) & has_tag


def _mask(readers: Column, block: int) -> Column:
    return F.aggregate(readers, F.lit(0).cast("bigint"), lambda mask, r: mask.bitwiseOR(r[f"bit{block}"]))
