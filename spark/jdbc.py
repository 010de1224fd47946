"""Reads of a database by Spark, through JDBC.

The URL of MariaDB is `jdbc:mysql:` (with MariaDB's driver): Spark has no dialect for `jdbc:mariadb:`, and would quote
identifiers in a way that MariaDB reads as constants.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from sqlalchemy.engine.url import URL

from notify.spark.bounds import READ_SECONDS
from notify.spark.pacing import waiting_sql

FETCH_ROWS = 20_000
DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "org.mariadb.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlite": "org.sqlite.JDBC",
}


def read(spark: SparkSession, url: URL, kind: str, table: str, schema: str) -> DataFrame:
    """The rows of a table or subquery. `kind`: postgresql, mysql or sqlite; `schema`: Spark's types of all columns."""
    address, properties = _address(url, kind)
    # SQLite gives no types for computed columns, and other databases give wider types.
    return spark.read.jdbc(address, table, properties=properties | {"customSchema": schema})


def read_parts(
    spark: SparkSession,
    url: URL,
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
    address, properties = _address(url, kind)
    if kind == "postgresql" and most_lag_us:
        properties["sessionInitStatement"] += f"; {waiting_sql(most_lag_us)}"
    return spark.read.jdbc(
        address, f"(SELECT {columns} FROM {table}) part", predicates=list(conditions),
        properties=properties | {"customSchema": schema},
    )  # fmt: skip


def _address(url: URL, kind: str) -> tuple[str, dict[str, str]]:
    properties = {"driver": DRIVERS[kind], "fetchsize": str(FETCH_ROWS)}
    if kind == "sqlite":
        return f"jdbc:sqlite:{url.database}", properties
    if url.username:
        properties["user"] = url.username
    if url.password:
        properties["password"] = str(url.password)
    place = f"{url.host or '127.0.0.1'}:{url.port or (5432 if kind == 'postgresql' else 3306)}/{url.database}"
    if kind == "postgresql":
        # A shorter timeout of the role or the database would end the read of a large table.
        properties["sessionInitStatement"] = f"SET statement_timeout = '{READ_SECONDS}s'"
        # This makes the transfer binary from the first row on; otherwise ids would come as hexadecimal text.
        return f"jdbc:postgresql://{place}?prepareThreshold=-1", properties
    # MariaDB's driver refuses the scheme jdbc:mysql: without permitMysqlScheme.
    return f"jdbc:mysql://{place}?permitMysqlScheme&allowPublicKeyRetrieval=true", properties
