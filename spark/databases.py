"""Databases as tables, read by JDBC in parts: local rows, inbox effects, and the halves of SQL storage.

Ids come as 16 bytes and times as microseconds since 1970, converted by the database: what Spark makes of a driver's
timestamps depends on time zones. MariaDB is read under `jdbc:mysql:` (with its own driver), since Spark has no dialect
for `jdbc:mariadb:` and then quotes identifiers in a way that compares constants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy.engine.url import URL

from notify import ids
from notify.client.table import half_message, notify_inbox, notify_source
from notify.databases import database_now
from notify.errors import InvalidRequest, Unavailable
from notify.storage.sql.dialects import open_engine
from notify.storage.sql.rows import microseconds_of, text_of
from notify.storage.sql.schema import check_version
from notify.storage.sql.tables import server_half_message

ROWS_A_PART = 250_000
MOST_PARTS = 64
FETCH_ROWS = 20_000
_DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "org.mariadb.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlite": "org.sqlite.JDBC",
}


@dataclass(frozen=True)
class Span:
    """Microseconds since 1970, [start, end)."""

    start_us: int
    end_us: int


class Database:
    """One database, by its SQLAlchemy URL.

    Raises InvalidRequest for a URL or schema that cannot be read, StorageFailed for a server's tables of another
    version, Unavailable where it does not answer.
    """

    def __init__(self, url: str, name: str = "") -> None:
        try:
            self._engine = open_engine(url, pooled=False)  # few statements, far apart
        except InvalidRequest as error:
            raise InvalidRequest(f"--database {name or url}: {error}") from None
        # Reading takes no lock: on SQLite a transaction would begin as a writer's.
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self.url: URL = self._engine.url
        self.kind = "mysql" if self.url.get_backend_name() == "mariadb" else self.url.get_backend_name()
        if self.kind not in _DRIVERS:
            raise InvalidRequest(f"--database: {self.kind} is not read; PostgreSQL, MySQL, MariaDB and SQLite are")
        self.name = name or self.url.database or self.kind
        try:
            with self._reading.connect() as connection:
                self.tables = set(sa.inspect(connection).get_table_names())
                now = connection.execute(sa.select(database_now())).scalar_one()
                self.clock_offset_us = microseconds_of(str(now)[:26]) - time.time_ns() // 1000
                self._check(connection)
            if server_half_message.name in self.tables:
                check_version(self._engine)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(f"database {self.name}: {_short(error)}") from None

    def _check(self, connection: sa.Connection) -> None:
        """Raises InvalidRequest for tables of another schema than this one knows."""
        for table in (half_message, notify_inbox, notify_source):
            if table.name not in self.tables:
                continue
            there = {c["name"] for c in sa.inspect(connection).get_columns(table.name)}
            missing = {c.name for c in table.columns} - there
            if missing:
                raise InvalidRequest(
                    f"database {self.name}: {table.name} lacks {', '.join(sorted(missing))}: it is of an older "
                    "schema; run create_tables, or the migration that docs/reference.md names"
                )

    def close(self) -> None:
        self._engine.dispose()

    def connect(self) -> sa.Connection:
        """A connection to its primary, to be closed."""
        return self._engine.connect()

    @property
    def now_us(self) -> int:
        """By the database's clock."""
        return time.time_ns() // 1000 + self.clock_offset_us

    def source_id(self) -> str:
        """The id that halves of this database carry, "" where it has none."""
        if notify_source.name not in self.tables:
            return ""
        with self._reading.connect() as connection:
            return str(connection.execute(sa.select(notify_source.c.id)).scalar() or "")

    def purged(self) -> tuple[int, int]:
        """Instants before which local rows, and inbox rows, may be gone; 0 where none is."""
        if notify_source.name not in self.tables:
            return 0, 0
        t = notify_source.c
        with self._reading.connect() as connection:
            row = connection.execute(sa.select(t.purged_before, t.rows_from, t.inbox_from)).first()
        return (0, 0) if row is None else (max(row[0], row[1]) * 1000, row[2] * 1000)

    def producer_groups(self) -> set[str]:
        """Whose local rows are here."""
        return self._distinct(half_message.c.producer_group)

    def inbox_groups(self) -> set[str]:
        """Whose effects are here."""
        return self._distinct(notify_inbox.c.consumer_group)

    def _distinct(self, column: sa.Column[Any]) -> set[str]:
        """The few values of a column. Where it leads an index, one search for each of them."""
        table, name = column.table.name, column.name
        if table not in self.tables:
            return set()
        if column.primary_key:
            query = (
                f"WITH RECURSIVE found(name) AS (SELECT min({name}) FROM {table} UNION ALL SELECT "
                f"(SELECT min({name}) FROM {table} WHERE {name} > found.name) FROM found WHERE found.name IS NOT NULL) "
                "SELECT name FROM found WHERE name IS NOT NULL"
            )
        else:
            query = f"SELECT DISTINCT {name} FROM {table}"
        with self._reading.connect() as connection:
            return {str(row[0]) for row in connection.exec_driver_sql(query)}

    # --- tables -----------------------------------------------------------------------------------------------

    def local_rows(self, spark: SparkSession, span: Span | None) -> DataFrame | None:
        """Rows of half_message as (id, no, producer_group, is_outbox, is_tombstone, topic, at_us) with ids made in
        `span`; None without the table."""
        if half_message.name not in self.tables:
            return None
        columns = (
            f"{self._id('transaction_id')} AS id, message_no AS no, producer_group, "
            "CASE WHEN mode = 'outbox' THEN 1 ELSE 0 END AS is_outbox, "
            "CASE WHEN state = 'ROLLED_BACK' THEN 1 ELSE 0 END AS is_tombstone, "
            f"topic, {self._us('created_at')} AS at_us"
        )
        schema = "id binary, no int, producer_group string, is_outbox int, is_tombstone int, topic string, at_us bigint"
        conditions = self._by_ids(half_message.c.transaction_id, span)
        return self._read(spark, half_message.name, columns, conditions, schema)

    def effects(self, spark: SparkSession, span: Span | None) -> DataFrame | None:
        """Rows of notify_inbox as (id, no, consumer_group, at_us), those made from the start of `span` on."""
        if notify_inbox.name not in self.tables:
            return None
        number = {
            "postgresql": "CAST(substr(message_id, 38) AS integer)",
            "mysql": "CAST(SUBSTR(message_id, 38) AS SIGNED)",
            "sqlite": "CAST(substr(message_id, 38) AS INTEGER)",
        }[self.kind]
        columns = (
            f"{self._id('substr(message_id, 1, 36)')} AS id, {number} AS no, consumer_group, "
            f"{self._us('created_at')} AS at_us"
        )
        schema = "id binary, no int, consumer_group string, at_us bigint"
        return self._read(spark, notify_inbox.name, columns, self._by_time(notify_inbox.c.created_at, span), schema)

    def doubled(self, spark: SparkSession, query: str) -> DataFrame:
        """(message_id, consumer_group, times) of effects that a query names more than once.

        `query` gives `message_id`, and `consumer_group` where one database has several groups' effects.
        """
        try:
            with self._reading.connect() as connection:
                there = list(connection.exec_driver_sql(f"SELECT * FROM ({query}) q WHERE 1 = 0").keys())
        except sa.exc.SQLAlchemyError as error:
            raise InvalidRequest(f"--effects on database {self.name}: {_short(error)}") from None
        if "message_id" not in there:
            raise InvalidRequest(f"--effects must give a column message_id; it gives {', '.join(there)}")
        group = "consumer_group" if "consumer_group" in there else "''"
        by = "message_id, consumer_group" if "consumer_group" in there else "message_id"
        return self._jdbc(
            spark,
            f"(SELECT message_id, {group} AS consumer_group, COUNT(*) AS times FROM ({query}) q GROUP BY {by} "
            "HAVING COUNT(*) > 1) counted",
            "message_id string, consumer_group string, times bigint",
        )

    def halves(self, spark: SparkSession, span: Span | None) -> DataFrame | None:
        """Rows of server_half_message as (id, no, producer_group, state, topic, half_us)."""
        if server_half_message.name not in self.tables:
            return None
        columns = (
            f"{self._id('transaction_id')} AS id, message_no AS no, producer_group, state, topic, "
            f"{self._us('created_at')} AS half_us"
        )
        where = self._by_ids(server_half_message.c.transaction_id, span)
        schema = "id binary, no int, producer_group string, state string, topic string, half_us bigint"
        return self._read(spark, server_half_message.name, columns, where, schema)

    def rows_of(self, transaction_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The local rows of some transactions, bodies included: evidence, and what a repair sends."""
        return self._rows(half_message, half_message.c.transaction_id.in_(transaction_ids))

    def halves_of(self, transaction_id: str) -> list[dict[str, Any]]:
        """The server's rows of a transaction."""
        return self._rows(server_half_message, server_half_message.c.transaction_id == transaction_id)

    def inbox_of(self, message_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The inbox rows of some messages."""
        return self._rows(notify_inbox, notify_inbox.c.message_id.in_(message_ids))

    def _rows(self, table: sa.Table, condition: sa.ColumnElement[bool]) -> list[dict[str, Any]]:
        if table.name not in self.tables:
            return []
        with self._reading.connect() as connection:
            known = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
            columns = [column for column in table.c if column.name in known]  # an older version made fewer
            return [dict(row) for row in connection.execute(sa.select(*columns).where(condition)).mappings()]

    # --- how it is read ---------------------------------------------------------------------------------------

    def _id(self, expression: str) -> str:
        if self.kind == "postgresql":
            return f"decode(replace({expression}, '-', ''), 'hex')"
        return f"unhex(replace({expression}, '-', ''))"

    def _us(self, column: str) -> str:
        return {
            # A double, exact to the microsecond until 2106; EXTRACT computes in decimals, which takes longer.
            "postgresql": f"CAST(date_part('epoch', {column}) * 1000000 AS bigint)",
            "mysql": f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column})",
            "sqlite": f"(CAST(strftime('%s', {column}) AS INTEGER) * 1000000 "
            f"+ CAST(substr({column}, 21, 6) AS INTEGER))",
        }[self.kind]

    def _by_ids(self, column: sa.Column[Any], span: Span | None) -> list[str]:
        """Conditions that part a table by ranges of its ids, which are made in time order."""
        within: sa.ColumnElement[bool] = sa.true()
        if span is not None:
            within = sa.and_(column >= _id_at(span.start_us), column < _id_at(span.end_us))
        first, last, count = self._extent(column, within)
        if first is None:
            return ["1 = 0"]
        low = ids.milliseconds(ids.from_text(first)) * 1000
        high = ids.milliseconds(ids.from_text(last)) * 1000 + 1000
        return _between(column.name, [_id_at(edge) for edge in _edges(low, high, count)])

    def _by_time(self, column: sa.Column[Any], span: Span | None) -> list[str]:
        """The same by a column of instants; only the start of `span` counts."""
        within: sa.ColumnElement[bool] = sa.true()
        if span is not None:
            within = column >= sa.literal_column(f"'{text_of(span.start_us)}'")
        first, last, count = self._extent(column, within)
        if first is None:
            return ["1 = 0"]
        edges = _edges(microseconds_of(first), microseconds_of(last) + 1, count)
        return _between(column.name, [text_of(edge) for edge in edges])

    def _extent(self, column: sa.Column[Any], within: sa.ColumnElement[bool]) -> tuple[Any, Any, int]:
        """A column's lowest and highest value, None where there is none, and about how many rows its table has."""
        with self._reading.connect() as connection:
            first, last = connection.execute(sa.select(sa.func.min(column), sa.func.max(column)).where(within)).one()
            return first, last, self._about(connection, column.table)

    def _about(self, connection: sa.Connection, table: Any) -> int:
        """About how many rows a table has, without counting them."""
        if self.kind == "postgresql":
            query = f"SELECT reltuples::bigint FROM pg_class WHERE oid = '{table.name}'::regclass"
        elif self.kind == "mysql":
            query = (
                "SELECT table_rows FROM information_schema.tables "
                f"WHERE table_schema = database() AND table_name = '{table.name}'"
            )
        else:
            query = f"SELECT count(*) FROM {table.name}"
        return max(0, int(connection.exec_driver_sql(query).scalar() or 0))

    def _read(self, spark: SparkSession, table: str, columns: str, conditions: list[str], schema: str) -> DataFrame:
        """One JDBC read for each condition, in parallel. Each is a subquery: the conditions are about columns that the
        outer statement no longer has."""
        parts = [
            self._jdbc(spark, f"(SELECT {columns} FROM {table} WHERE {condition}) part", schema)
            for condition in conditions
        ]
        return reduce(DataFrame.unionAll, parts)

    def _jdbc(self, spark: SparkSession, table: str, schema: str) -> DataFrame:
        url, properties = self._jdbc_url()
        # Types are told: SQLite has none for what is computed, and others have wider ones.
        return spark.read.jdbc(url, table, properties=properties | {"customSchema": schema})

    def _jdbc_url(self) -> tuple[str, dict[str, str]]:
        u = self.url
        properties = {"driver": _DRIVERS[self.kind], "fetchsize": str(FETCH_ROWS)}
        if self.kind == "sqlite":
            return f"jdbc:sqlite:{u.database}", properties
        if u.username:
            properties["user"] = u.username
        if u.password:
            properties["password"] = str(u.password)
        place = f"{u.host or '127.0.0.1'}:{u.port or (5432 if self.kind == 'postgresql' else 3306)}/{u.database}"
        if self.kind == "postgresql":
            # From the first row on in binary: ids would come as hexadecimal text otherwise.
            return f"jdbc:postgresql://{place}?prepareThreshold=-1", properties
        # Without this the driver refuses the scheme that Spark knows.
        return f"jdbc:mysql://{place}?permitMysqlScheme&allowPublicKeyRetrieval=true", properties


def _between(name: str, edges: Sequence[str]) -> list[str]:
    """Conditions for the ranges between borders."""
    return [f"{name} >= '{a}' AND {name} < '{b}'" for a, b in zip(edges, edges[1:], strict=False)]


def _edges(low: int, high: int, rows: int) -> list[int]:
    """Borders of parts of a range."""
    parts = min(MOST_PARTS, max(1, rows // ROWS_A_PART))
    return [low + (high - low) * i // parts for i in range(parts)] + [high]


def _id_at(us: int) -> str:
    """The lowest id of an instant."""
    return ids.to_text(max(0, us // 1000).to_bytes(6) + bytes(10))


def _short(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]
