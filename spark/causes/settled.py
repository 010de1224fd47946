"""When consumer groups last settled a message: a stuck group is another cause than a slow one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from notify.client.tables.definitions import notify_inbox
from notify.spark.causes.subjects import Subject
from notify.spark.inputs.columns import ATTEMPTED, name_hash
from notify.spark.inputs.expressions import Expressions
from notify.spark.result import Found, Inputs
from notify.storage.sql.rows import microseconds_of, moment_of

STILL, BEHIND, LEFT_OUT = "still", "behind", "left out"
"""States of a subject of UNDELIVERED: it settles nothing; it settles, and not these yet; it settled later ones."""


@dataclass(frozen=True)
class Settled:
    """The last settlement of a group in a queue. Instants are in microseconds since 1970; 0: none, or not known."""

    at_us: int = 0
    queued_us: int = 0
    """When the newest message that it settled there was queued."""

    def newest(self, other: Settled) -> Settled:
        return Settled(max(self.at_us, other.at_us), max(self.queued_us, other.queued_us))


LastSettled = Mapping[tuple[str, str, int], Settled]
"""The last settlement by group, topic and queue. Over Kafka only the inbox says it: topic "" and queue -1."""


@dataclass(frozen=True)
class Standstill:
    """The last settlements of groups. Instants are in microseconds since 1970."""

    last: LastSettled
    still_before_us: int
    """A group whose last settlement is older is stuck."""

    def with_state(self, subject: Subject, case: Found) -> Subject:
        """The subject of an undelivered message with its state; another one as it is."""
        if subject.finding != "UNDELIVERED":
            return subject
        settled = self._in_queue(subject.name, case)
        if settled.at_us < self.still_before_us:
            return replace(subject, state=STILL)
        is_passed = settled.queued_us > case.evidence.get("queued_us", case.at_us)
        return replace(subject, state=LEFT_OUT if is_passed else BEHIND)

    def last_us(self, group: str, cases: Iterable[Found]) -> int:
        """The last settlement of a group in the queues of these cases; 0: none since the first of them."""
        return max((self._in_queue(group, case).at_us for case in cases), default=0)

    def is_still(self, group: str) -> bool:
        """Whether the group settles nothing in any queue."""
        return all(s.at_us < self.still_before_us for key, s in self.last.items() if key[0] == group)

    def _in_queue(self, group: str, case: Found) -> Settled:
        own = self.last.get((group, case.topic, -1 if case.queue is None else case.queue), Settled())
        return own.newest(self.last.get((group, "", -1), Settled()))


def last_settled(spark: SparkSession, inputs: Inputs, cases: Iterable[Found]) -> LastSettled:
    """When each group with undelivered messages among `cases` last settled a message since its first of these was
    queued. A group that settled none is missing."""
    undelivered = [case for case in cases if case.finding == "UNDELIVERED"]
    groups = sorted({group for case in undelivered for group in case.groups})
    if not groups:
        return {}
    names = {name_hash(group): group for group in groups}
    from_us = min(case.evidence.get("queued_us", case.at_us) for case in undelivered)
    last: dict[tuple[str, str, int], Settled] = {}
    for log in inputs.logs:
        acks = log.acks(spark, from_us, with_ids=False)
        if acks is None:
            continue
        settled = acks.where((F.col("kind") != ATTEMPTED) & F.col("consumer_group").isin(list(names)))
        newest = (F.max("at_us").alias("at_us"), F.max("queued_us").alias("queued_us"))
        for row in settled.groupBy("consumer_group", "topic", "queue").agg(*newest).collect():
            key = (names[row["consumer_group"]], log.catalog.topics.get(row["topic"], ""), row["queue"])
            last[key] = Settled(row["at_us"], row["queued_us"] or 0).newest(last.get(key, Settled()))
    if inputs.kafka:
        for group, at_us in _last_effects(inputs, groups, from_us).items():
            last[(group, "", -1)] = Settled(at_us)
    return last


def _last_effects(inputs: Inputs, groups: Collection[str], from_us: int) -> dict[str, int]:
    t = notify_inbox.c
    newest = (
        sa.select(t.consumer_group, sa.func.max(t.created_at))
        .where(t.created_at >= moment_of(from_us), t.consumer_group.in_(groups))
        .group_by(t.consumer_group)
    )
    last: dict[str, int] = {}
    for database in inputs.databases:
        if notify_inbox.name in database.tables:
            is_instant = sa.literal_column(Expressions(database.kind).is_instant("created_at"), sa.Boolean())
            with database.reading() as connection:
                for group, at in connection.execute(newest.where(is_instant)):
                    last[group] = max(last.get(group, 0), microseconds_of(at))
    return last
