"""Runs work in tasks of Spark, one item in each task; also over Spark Connect, which has no RDDs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from notify.spark.small_table import small_table

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_AT_ONCE = 4096
"""The most items of one job: this process receives all results of a job together."""


def each(spark: SparkSession, items: Sequence[Item], do: Callable[[Item], Result]) -> list[Result]:
    """Call `do` with each item in a separate task. Returns the results in the order of the items.

    Items and results are pickled. This process holds all results, so they should be small.
    """
    results: list[Result] = []
    for first in range(0, len(items), MOST_AT_ONCE):
        results += _job(spark, items[first : first + MOST_AT_ONCE], do)
    return results


def _job(spark: SparkSession, items: Sequence[Item], do: Callable[[Item], Result]) -> list[Result]:
    work: bytes = cloudpickle.dumps(do)  # type: ignore[no-untyped-call]

    def done(item: bytes) -> bytes:
        return pickle.dumps(pickle.loads(work)(pickle.loads(item)))

    rows = [(number, pickle.dumps(item)) for number, item in enumerate(items)]
    table = small_table(spark, {"number": pa.int32(), "item": pa.binary()}, rows)
    # Arrow would need pandas, and these rows are few.
    run = F.udf(done, "binary", useArrow=False)
    spread = table.repartitionById(len(items), "number").select("number", run("item").alias("result"))
    return [pickle.loads(row["result"]) for row in sorted(spread.collect(), key=lambda row: int(row["number"]))]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a client of Spark Connect, which has no SparkContext."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


@lru_cache(maxsize=4)
def cores_of(spark: SparkSession) -> int:
    """How many tasks Spark runs at once."""
    if not is_connect(spark):
        return int(spark.sparkContext.defaultParallelism)
    # Spark Connect does not tell its clients, but a range has as many partitions as there are cores.
    parts = spark.range(1 << 20).select(F.spark_partition_id().alias("part")).distinct().count()
    return max(1, int(parts))
