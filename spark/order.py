"""Messages of a key that were settled after a later one, also where one key has most of the messages.

A window over all rows of a key sorts them in one task. So a key with many rows is cut by places in the log: the highest
offset of each part comes from an aggregate, and each part is a window of its own that begins with the highest offset
before it.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

HOT_ROWS = 1_000_000
"""A key with more rows is spread over tasks."""
PART_BYTES = 64 << 20
"""Such a key's rows of so many bytes of the log are one part."""
MOST_HOT_KEYS = 10_000
"""More keys than this cannot each be hot on a machine: the rest stays in one task for each key."""
_KEY = ["group", "topic", "queue", "key_hash", "epoch"]


def settled_late(settled: DataFrame, rows: int) -> DataFrame:
    """The rows that were settled after one of the same key with a higher offset, which is added as `highest`.

    `settled`: rows of group, topic, queue, key_hash, epoch, `seq` (place in the log) and offset. `rows`: about how many
    there are.
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
        highest = F.greatest(highest, earlier)  # of what is not null
    return settled.withColumn("highest", highest).where("highest > offset")
