"""Inboxes that began later than their group.

A message that the group acknowledged before has no inbox row, although it took effect. The subscription of a group to a
topic says from which instant on the consumers' inbox has rows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.client.tables.old_rows import CLOCK_SKEW
from notify.spark.inputs.catalog import Subscribed
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge.message_rows import Groups, bits, parts_of_place, place_of
from notify.spark.small_table import small_table
from notify.storage.groups import SettleKind

NEVER_US = sys.maxsize
_SKEW_US = round(CLOCK_SKEW.total_seconds() * 1e6)


def begins_us(subscribed: Subscribed) -> int:
    """The instant from which on the inbox has rows; NEVER_US if the consumers have reported no inbox."""
    return subscribed.inbox_from_us if subscribed.inbox_from_us >= 0 else NEVER_US


def with_late_inboxes(
    spark: SparkSession,
    rows: DataFrame,
    logs: Sequence[LogInput],
    groups: Groups,
    inboxes: Collection[str],
    from_us: int,
) -> DataFrame:
    """Rows of messages with masks `before_inbox0`, …: groups that acknowledged the message before their inbox began.

    `inboxes`: the groups with inbox rows; other groups are in no mask. `from_us`: acknowledgements from before this
    instant are not judged, because inbox rows were purged.
    """
    blocks = range(groups.blocks)
    names = [f"bit{b}" for b in blocks]
    table = [
        (
            place,
            [{"until": until} | {name: groups.bit(group, b) for b, name in enumerate(names)} for group, until in late],
        )
        for place, late in _late(logs, set(inboxes), from_us)
    ]
    if not table:
        return rows.withColumns({f"before_inbox{b}": F.lit(0).cast("bigint") for b in blocks})
    one = pa.struct([(name, pa.int64()) for name in ("until", *names)])
    joined = rows.join(
        F.broadcast(small_table(spark, {"place": pa.int64(), "late": pa.list_(one)}, table)), "place", "left"
    )
    at_us = F.coalesce("acked_us", "queued_us")
    before = F.filter("late", lambda inbox: at_us < inbox["until"])
    masks = {f"before_inbox{b}": bits(_mask(before, f"bit{b}")) for b in blocks}
    since = _acked_since(spark, logs, groups, set(inboxes), from_us)
    if since is not None:  # a row has the first acknowledgement of any group
        joined = joined.join(since, ["id", "no"], "left")
        masks = {
            name: mask.bitwiseAND(F.bitwise_not(bits(F.col(f"since{b}"))))
            for b, (name, mask) in enumerate(masks.items())
        }
    return joined.withColumns(masks).drop("late", *[f"since{b}" for b in blocks])


def _acked_since(
    spark: SparkSession, logs: Sequence[LogInput], groups: Groups, inboxes: set[str], from_us: int
) -> DataFrame | None:
    """(id, no) with masks `since0`, … of the groups that acknowledged the message since their inbox began."""
    blocks = range(groups.blocks)
    columns = {"consumer_group": pa.int64(), "topic": pa.int64(), "until": pa.int64()}
    columns |= {f"bit{b}": pa.int64() for b in blocks}
    tables: list[DataFrame] = []
    for number, log in enumerate(logs):
        late = {
            (group, parts_of_place(place)[1], until)
            for place, several in _late(logs[number : number + 1], inboxes, from_us)
            for group, until in several
            if until != NEVER_US
        }
        acks = log.acks(spark) if late else None
        if acks is not None:
            rows = [
                (name_hash(g), topic, until, *[groups.bit(g, b) for b in blocks]) for g, topic, until in sorted(late)
            ]
            began = F.broadcast(small_table(spark, columns, rows))
            is_since = (F.col("kind") == int(SettleKind.ACK)) & (F.col("at_us") >= F.col("until"))
            tables.append(acks.join(began, ["consumer_group", "topic"]).where(is_since))
    if not tables:
        return None
    named = [table.select("id", "no", *[f"bit{b}" for b in blocks]) for table in tables]
    together = reduce(DataFrame.unionAll, named)
    return together.groupBy("id", "no").agg(*[F.bit_or(f"bit{b}").alias(f"since{b}") for b in blocks])


def _mask(inboxes: Column, bit: str) -> Column:
    return F.aggregate(inboxes, F.lit(0).cast("bigint"), lambda mask, inbox: mask.bitwiseOR(inbox[bit]))


def _late(logs: Sequence[LogInput], inboxes: set[str], from_us: int) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Each queue with late inboxes: the groups, and the instants at which their inboxes begin."""
    for number, log in enumerate(logs):
        by_topic: dict[str, list[tuple[str, int]]] = {}
        for subscribed in log.catalog.subscriptions.values():
            # A purge moves the instant, too: to the mark in the database, and by a margin for clocks.
            group, from_inbox_us = subscribed.group, begins_us(subscribed)
            if group in inboxes and from_inbox_us > from_us + (_SKEW_US if from_us else 0):
                by_topic.setdefault(subscribed.topic, []).append((group, from_inbox_us))
        for topic, name in log.catalog.topics.items():
            if name in by_topic:
                for queue in range(log.catalog.queues.get(topic, 1)):
                    yield place_of(number, topic, queue), by_topic[name]
