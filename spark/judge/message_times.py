"""The time of a message: the time of its transaction, by its row or by its id."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.inputs.ranges import EPOCH_US


def made_us() -> Column:
    """When a transaction's id was made, by its producer's clock: the column `made_us` that other conditions use.

    There is always a value, so the partition number in `coalesce` is never used. It only keeps Spark from repeating
    this long expression in each condition that uses the column.
    """
    made = F.conv(F.hex(F.substring("id", 1, 6)), 16, 10).cast("bigint") * 1000
    return F.coalesce(made, F.spark_partition_id())


def event_us(slack_us: int, ahead_us: int, whole_from_us: int) -> Column:
    """The time of a message: the time of its local row, otherwise of its half, its place in a queue, or its effect.

    If that time differs by more than `slack_us` from the time in the id, the time in the id counts: tables are read by
    ids, so that each message is in one window of time. An id with an impossible time would be in no window, so then the
    time of the row counts. Impossible times are those from `ahead_us` on, those before this software existed, and, if
    all ids are read, those before `whole_from_us` (0: not all ids are read).
    """
    at_us, made = F.coalesce("t_us", "half_us", "queued_us", "effect_us"), F.col("made_us")
    is_early = F.coalesce("t_us", "half_us").isNotNull() & (made < whole_from_us)
    is_odd = is_early | (made < EPOCH_US) | (made >= ahead_us)
    is_near = F.abs(at_us - made) <= slack_us
    return F.when(is_near | is_odd, at_us).when(at_us.isNotNull(), made)
