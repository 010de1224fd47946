"""Small tables from values of the driver, such as names, numbers and ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession


def small_table(spark: SparkSession, columns: Mapping[str, pa.DataType], rows: Iterable[Sequence[Any]]) -> DataFrame:
    """A table of these rows; each row has a value for every column, in order.

    Spark plans it as a local relation. From a list of rows it would make an RDD, and each join would run another job.
    """
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    arrays = [pa.array(column, kind) for column, kind in zip(values, columns.values(), strict=True)]
    return spark.createDataFrame(pa.table(arrays, names=list(columns)))
