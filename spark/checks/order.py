"""Finds messages that were settled after a later message of their key, also if one key has most of the messages.

A window over all rows of a key sorts them in one task. A key with many rows is therefore cut into parts by place in the
log. An aggregate gives the highest offset of each part, and each part is a window that begins with the highest offset
before it.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

HOT_ROWS = 1_000_000
"""A key with more rows is hot: its rows are spread over tasks."""
PART_BYTES = 64 << 20
"""How many bytes of the log one part of a hot key covers."""
MOST_HOT_KEYS = 10_000
"""The most hot keys that are spread; further ones stay in one task each."""
_KEY = ["group", "topic", "queue", "key_hash", "epoch"]


def settled_late(settled: DataFrame, rows: int) -> DataFrame:
    """The rows that were settled after a row of the same key with a higher offset, which is added as `highest`.

    `settled`: rows of group, topic, queue, key_hash, epoch, `seq` (place in the log) and offset. `rows`: their
    approximate number.
    """
    if rows <= HOT_ROWS:
        return _late(settled, _KEY)
    hot = settled.groupBy(*_KEY).count().where(F.col("count") > HOT_ROWS).select(*_KEY).limit(MOST_HOT_KEYS)
    hot = F.broadcast(hot)
    cold = _late(settled.join(hot, _KEY, "left_anti"), _KEY)
    return cold.unionByName(_late_of_hot(settled.join(hot, _KEY, "left_semi")))


def _late_of_hot(settled: DataFrame) -> DataFrame:
    parted = settled.withColumn("part", F.floor(F.col("seq") / PART_BYTES))
    highest = parted.groupBy(*_KEY, "part").agg(F.max("offset").alias("highest_there"))
    before = Window.partitionBy(*_KEY).orderBy("part").rowsBetween(Window.unboundedPreceding, -1)
    earlier = highest.withColumn("highest_before", F.max("highest_there").over(before)).drop("highest_there")
    joined = parted.join(earlier, [*_KEY, "part"])
    return _late(joined, [*_KEY, "part"], F.col("highest_before")).drop("part", "highest_before")


def _late(settled: DataFrame, key: list[str], earlier: Column | None = None) -> DataFrame:
    """`earlier`: the highest offset before the rows of this key."""
    before = Window.partitionBy(*key).orderBy("seq", "offset").rowsBetween(Window.unboundedPreceding, -1)
    highest = F.max("offset").over(before)
    if earlier is not None:
        highest = F.greatest(highest, earlier)  # ignores null
    return settled.withColumn("highest", highest).where("highest > offset")
