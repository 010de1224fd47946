"""Reads of a database by Spark, through JDBC. What to connect to, and how, says `jdbc_urls`."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from notify.runtime.databases import MYSQL_ANY_WORK
from notify.spark.inputs.jdbc_urls import DRIVERS, Address
from notify.spark.inputs.pacing import waiting_sql
from notify.spark.inputs.query_bounds import READ_SECONDS

FETCH_ROWS = 20_000


def read(spark: SparkSession, address: Address, kind: str, table: str, schema: str) -> DataFrame:
    """The rows of a table or subquery. `kind`: postgresql, mysql or sqlite; `schema`: Spark's types of all columns."""
    # SQLite gives no types for computed columns, and other databases give wider types.
    return spark.read.jdbc(address.url, table, properties=_properties(address, kind) | {"customSchema": schema})


def read_parts(
    spark: SparkSession,
    address: Address,
    kind: str,
    query: tuple[str, str],
    conditions: Sequence[str],
    schema: str,
    *,
    most_lag_us: int = 0,
) -> DataFrame:
    """The rows of a table in parts: one task for each condition.

    `query`: columns and table; the columns must include those that the conditions name. `most_lag_us`: a task that
    reads a standby of PostgreSQL waits until the standby lags by no more than this; 0: it does not wait.
    """
    columns, table = query
    return spark.read.jdbc(
        address.url, f"(SELECT {columns} FROM {table}) part", predicates=list(conditions),
        properties=_properties(address, kind, most_lag_us) | {"customSchema": schema},
    )  # fmt: skip


def _properties(address: Address, kind: str, most_lag_us: int = 0) -> dict[str, str]:
    first = [address.first] if address.first else []
    if kind == "postgresql":
        # A shorter timeout of the role or the database would end the read of a large table.
        first.append(f"SET statement_timeout = '{READ_SECONDS}s'")
        if most_lag_us:
            first.append(waiting_sql(most_lag_us))
    elif kind == "mysql":
        # One statement, since the driver takes no more. The server's settings for its other clients may cut rows off.
        first = [f"{address.first}, {MYSQL_ANY_WORK}" if address.first else f"SET SESSION {MYSQL_ANY_WORK}"]
    properties = {**address.properties, "driver": DRIVERS[kind], "fetchsize": str(FETCH_ROWS)}
    return properties | ({"sessionInitStatement": "; ".join(first)} if first else {})
