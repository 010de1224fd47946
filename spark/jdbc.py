"""Reads of a database by Spark, through JDBC.

MariaDB is read as `jdbc:mysql:` (with its own driver): Spark has no dialect for `jdbc:mariadb:`, and would quote
identifiers so that MariaDB takes them for constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from sqlalchemy.engine.url import URL

from notify.spark.bounds import READ_SECONDS

FETCH_ROWS = 20_000
DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "org.mariadb.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlite": "org.sqlite.JDBC",
}


def read(spark: SparkSession, url: URL, kind: str, table: str, schema: str) -> DataFrame:
    """A table or subquery. `kind`: postgresql, mysql or sqlite; `schema`: the types of all columns, for Spark."""
    address, properties = _address(url, kind)
    # SQLite has no types for computed columns, and other databases have wider ones.
    return spark.read.jdbc(address, table, properties=properties | {"customSchema": schema})


def read_parts(
    spark: SparkSession, url: URL, kind: str, query: tuple[str, str], conditions: Sequence[str], schema: str
) -> DataFrame:
    """One read for each condition, of `query` (columns and table): a subquery, because the outer statement lacks its
    columns."""
    columns, table = query
    return reduce(
        DataFrame.unionAll,
        [
            read(spark, url, kind, f"(SELECT {columns} FROM {table} WHERE {condition}) part", schema)
            for condition in conditions
        ],
    )


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
        # A bound that is set for the role or the database would end the read of a large table.
        properties["sessionInitStatement"] = f"SET statement_timeout = '{READ_SECONDS}s'"
        # Binary transfer from the first row on; otherwise ids would come as hexadecimal text.
        return f"jdbc:postgresql://{place}?prepareThreshold=-1", properties
    # MariaDB's driver refuses the scheme jdbc:mysql: without permitMysqlScheme.
    return f"jdbc:mysql://{place}?permitMysqlScheme&allowPublicKeyRetrieval=true", properties
