"""Inboxes that began later than their group: what the group acknowledged before has no row, and took effect all the
same.

A subscription says from when on the inbox of its consumers has rows; each topic of a group has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from notify.client.old_rows import CLOCK_SKEW
from notify.spark.catalog import Subscribed
from notify.spark.life import Groups, place_of
from notify.spark.log_input import LogInput
from notify.spark.small_table import small_table

NEVER_US = sys.maxsize
_SKEW_US = round(CLOCK_SKEW.total_seconds() * 1e6)


def begins_us(s: Subscribed) -> int:
    """The instant from which on the inbox has rows; NEVER_US if the consumers have told of none."""
    return s.inbox_from_us if s.inbox_from_us >= 0 else NEVER_US


def with_late_inboxes(
    spark: SparkSession, rows: DataFrame, logs: Sequence[LogInput], groups: Groups, known: Collection[str], from_us: int
) -> DataFrame:
    """Rows of messages with masks `before_inbox0`, …: the groups among `known` (those with inbox rows) whose inbox has
    none of messages acknowledged so early.

    `from_us`: no acknowledgement from before is judged, because rows of inboxes were purged.
    """
    blocks = range(groups.blocks)
    names = [f"bit{b}" for b in blocks]
    table = [
        (
            place,
            [{"until": until} | {name: groups.bit(group, b) for b, name in enumerate(names)} for group, until in late],
        )
        for place, late in _late(logs, set(known), from_us)
    ]
    if not table:
        return rows.withColumns({f"before_inbox{b}": F.lit(0).cast("bigint") for b in blocks})
    one = pa.struct([(name, pa.int64()) for name in ("until", *names)])
    joined = rows.join(
        F.broadcast(small_table(spark, {"place": pa.int64(), "late": pa.list_(one)}, table)), "place", "left"
    )
    at_us = F.coalesce("acked_us", "queued_us")
    before = F.filter("late", lambda inbox: at_us < inbox["until"])
    masks = {f"before_inbox{b}": F.coalesce(_mask(before, f"bit{b}"), F.lit(0).cast("bigint")) for b in blocks}
    return joined.withColumns(masks).drop("late")


def _mask(inboxes: Column, bit: str) -> Column:
    return F.aggregate(inboxes, F.lit(0).cast("bigint"), lambda mask, inbox: mask.bitwiseOR(inbox[bit]))


def _late(logs: Sequence[LogInput], known: set[str], from_us: int) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Each queue that has such groups, with the instants at which their inboxes begin."""
    for number, log in enumerate(logs):
        by_topic: dict[str, list[tuple[str, int]]] = {}
        for s in log.catalog.subscriptions.values():
            # A purge moves the instant, too: by the mark in the database, and a margin for clocks.
            if s.group in known and begins_us(s) > from_us + (_SKEW_US if from_us else 0):
                by_topic.setdefault(s.topic, []).append((s.group, begins_us(s)))
        for topic, name in log.catalog.topics.items():
            if name in by_topic:
                for queue in range(log.catalog.queues.get(topic, 1)):
                    yield place_of(number, topic, queue), by_topic[name]
