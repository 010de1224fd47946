"""Reads of a database by Spark, through JDBC.

The URL of MariaDB is `jdbc:mysql:` (with MariaDB's driver): Spark has no dialect for `jdbc:mariadb:`, and would quote
identifiers in a way that MariaDB reads as constants. The TLS options of the database's URL apply to these reads as to
the audit's own statements.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy.engine.url import URL
from sqlalchemy.util import asbool

from notify.errors import InvalidRequest
from notify.spark.bounds import READ_SECONDS
from notify.spark.pacing import waiting_sql

FETCH_ROWS = 20_000
_TLS_OF_POSTGRESQL = ("sslmode", "sslrootcert")
"""Options of libpq that PostgreSQL's JDBC driver knows by the same names."""
DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "org.mariadb.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlite": "org.sqlite.JDBC",
}


def check_reachable(url: URL, named: str) -> None:
    """Raises InvalidRequest for a URL that names its server by a socket: the drivers would read another one, by TCP."""
    for option in ("unix_socket", "host"):
        if option in url.query:
            raise InvalidRequest(
                f"{named}: Spark reads by TCP: write the server's host and port into the URL, without {option}=…"
            )


def is_encrypted(connection: sa.Connection, kind: str) -> bool:
    """Whether a connection to MySQL or MariaDB is encrypted; False for others, whose drivers try TLS themselves."""
    if kind != "mysql":
        return False
    row = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Ssl_cipher'").first()
    return row is not None and bool(row[1])


def read(spark: SparkSession, url: URL, kind: str, table: str, schema: str, *, encrypted: bool = False) -> DataFrame:
    """The rows of a table or subquery. `kind`: postgresql, mysql or sqlite; `schema`: Spark's types of all columns.

    `encrypted`: see `is_encrypted`.
    """
    address, properties = _address(url, kind, encrypted)
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
    encrypted: bool = False,
    most_lag_us: int = 0,
) -> DataFrame:
    """The rows of a table in parts: one task for each condition.

    `query`: columns and table; the columns must include those that the conditions name. `most_lag_us`: a task that
    reads a standby of PostgreSQL waits until the standby lags by no more than this; 0: it does not wait.
    """
    columns, table = query
    address, properties = _address(url, kind, encrypted)
    if kind == "postgresql" and most_lag_us:
        properties["sessionInitStatement"] += f"; {waiting_sql(most_lag_us)}"
    return spark.read.jdbc(
        address, f"(SELECT {columns} FROM {table}) part", predicates=list(conditions),
        properties=properties | {"customSchema": schema},
    )  # fmt: skip


def _address(url: URL, kind: str, encrypted: bool) -> tuple[str, dict[str, str]]:
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
        properties |= {name: str(url.query[name]) for name in _TLS_OF_POSTGRESQL if name in url.query}
        return f"jdbc:postgresql://{place}?prepareThreshold=-1", properties
    # MariaDB's driver refuses the scheme jdbc:mysql: without permitMysqlScheme.
    address = f"jdbc:mysql://{place}?permitMysqlScheme&allowPublicKeyRetrieval=true"
    return address, properties | (_tls_of_mysql(url) if encrypted else {})


def _tls_of_mysql(url: URL) -> dict[str, str]:
    """The properties with which MariaDB's driver checks a certificate as strictly as SQLAlchemy and PyMySQL do.

    It cannot try TLS and continue without it, so the caller must know that the server offers TLS. It cannot read a
    folder of certificates: with `ssl_capath` it trusts the authorities that Java trusts.
    """
    authority = url.query.get("ssl_ca")
    is_checked = bool(authority or url.query.get("ssl_capath"))
    checks_name = is_checked and asbool(url.query.get("ssl_check_hostname", "true"))
    if checks_name or asbool(url.query.get("ssl_verify_identity", "false")):
        mode = "verify-full"
    elif is_checked or asbool(url.query.get("ssl_verify_cert", "false")):
        mode = "verify-ca"
    else:
        mode = "trust"
    return {"sslMode": mode} | ({"serverSslCert": str(authority)} if authority else {})
