"""The time of a message: its transaction's, by its row or by its id."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from notify.spark.ranges import EPOCH_US


def made_us() -> Column:
    """When a transaction's id was made, by its producer's clock: the column `made_us` of other conditions.

    The number of a partition stands for no value, because there is always one. It keeps Spark from repeating the whole
    expression, as long as all the others together, in each condition that uses the column.
    """
    made = F.conv(F.hex(F.substring("id", 1, 6)), 16, 10).cast("bigint") * 1000
    return F.coalesce(made, F.spark_partition_id())


def event_us(slack_us: int, ahead_us: int, whole_from_us: int) -> Column:
    """A message's time: that of its local row, or else its half, its place in a queue, or its effect.

    If that differs by more than `slack_us` from the time in its id, it is the time in the id: tables are read by ids,
    and so each message is in one window of time. But an id of a time that cannot be would be in none: one from
    `ahead_us` on, from before this software was, or from before `whole_from_us`, where all ids are read (0: they are
    not). Then it is the time of the row.
    """
    at_us, made = F.coalesce("t_us", "half_us", "queued_us", "effect_us"), F.col("made_us")
    is_early = F.coalesce("t_us", "half_us").isNotNull() & (made < whole_from_us)
    is_odd = is_early | (made < EPOCH_US) | (made >= ahead_us)
    is_near = F.abs(at_us - made) <= slack_us
    return F.when(is_near | is_odd, at_us).when(at_us.isNotNull(), made)
