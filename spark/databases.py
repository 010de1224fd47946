"""Databases as tables that Spark reads by JDBC, in parts: local rows, inbox effects, and the halves of SQL storage.

The database converts ids to 16 bytes and times to microseconds since 1970, because the timestamps that Spark reads from
a driver depend on time zones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy.engine.url import URL

from notify.client.table import half_message, has_digest, notify_inbox, notify_source
from notify.databases import database_now, is_gone, reason_of
from notify.errors import InvalidRequest, Unavailable
from notify.spark import jdbc
from notify.spark.bounds import READ_SECONDS, bounded
from notify.spark.columns import source_of
from notify.spark.digest import hashes
from notify.spark.digest.drill import Drill
from notify.spark.expressions import MOST_NUMBER, Expressions
from notify.spark.pacing import Pace
from notify.spark.ranges import Span, conditions_of, id_at
from notify.spark.replicas import Replica, replica_of
from notify.spark.table_parts import TableParts
from notify.spark.unmoved import UNMOVED_SQL
from notify.storage.sql.engines import open_engine
from notify.storage.sql.rows import microseconds_of, text_of
from notify.storage.sql.schema import check_version
from notify.storage.sql.tables import server_half_message
from notify.urls import without_secrets


class Database:
    """One database, given by its SQLAlchemy URL.

    Raises InvalidRequest if the URL or the schema cannot be read, StorageFailed if a server's tables have another
    version, and Unavailable if the database does not answer.
    """

    def __init__(self, url: str, name: str = "", most_lag_seconds: float = 0.0) -> None:
        """`most_lag_seconds`: each read waits until a copy lags by no more than this; 0: it does not wait."""
        named = f"--database {name}".rstrip()
        # No pool: this process runs few statements, far apart.
        self._engine = open_engine(url, named=named, pooled=False, statement_seconds=READ_SECONDS)
        # No transactions: those of SQLite would begin with the writer's lock (`use_explicit_begin`).
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self.url: URL = self._engine.url
        self.kind = "mysql" if self.url.get_backend_name() == "mariadb" else self.url.get_backend_name()
        if self.kind not in jdbc.DRIVERS:
            raise InvalidRequest(
                f"--database: the audit cannot read {self.kind}; it reads PostgreSQL, MySQL, MariaDB and SQLite"
            )
        jdbc.check_reachable(self.url, named)
        self._sql = Expressions(self.kind)
        self.parts = TableParts(self.kind, self.reading)
        self._most_lag_us = round(most_lag_seconds * 1e6)
        self.pace = Pace(name or without_secrets(url), self._most_lag_us, self.replica, lambda: self.now_us)
        """Waits if this database is a copy that lags too much."""
        self.sound: set[str] = set()
        """The tables of which it is known that every id is well-formed."""
        self.name = name or self.url.database or self.kind
        try:
            with self._reading.connect() as connection:
                self._is_encrypted = jdbc.is_encrypted(connection, self.kind)
                self.tables = set(sa.inspect(connection).get_table_names())
                now = connection.execute(sa.select(database_now())).scalar_one()
                self.clock_offset_us = microseconds_of(str(now)[:26]) - time.time_ns() // 1000
                self._check(connection)
                self.has_digests = half_message.name in self.tables and has_digest(connection)
            if server_half_message.name in self.tables:
                check_version(self._reading, exactly=True)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(f"database {self.name}: {reason_of(error)}") from None

    def _check(self, connection: sa.Connection) -> None:
        """Raises InvalidRequest if a table lacks columns."""
        for table in (half_message, notify_inbox, notify_source):
            if table.name not in self.tables:
                continue
            present = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
            missing = {column.name for column in table.columns if not column.nullable} - present
            if missing:
                raise InvalidRequest(
                    f"database {self.name}: the table {table.name} lacks {', '.join(sorted(missing))}: an older "
                    "version made it; run create_tables or the Alembic helper's upgrade (docs/reference.md)"
                )

    def close(self) -> None:
        self._engine.dispose()

    def connect(self) -> sa.Connection:
        """A connection with a transaction for writes; the caller commits and closes it."""
        return self._engine.connect()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A new connection without a transaction. Raises Unavailable if a query takes longer than allowed."""
        with bounded(self.name), self._reading.connect() as connection:
            yield connection

    @property
    def now_us(self) -> int:
        """The time of the database's clock, in microseconds since 1970."""
        return time.time_ns() // 1000 + self.clock_offset_us

    def source_id(self) -> str:
        """The id of this database, which its halves carry; "" if the database has no id."""
        if notify_source.name not in self.tables:
            return ""
        with self.reading() as connection:
            return str(connection.execute(sa.select(notify_source.c.id)).scalar() or "")

    def replica(self) -> Replica | None:
        """How current this copy is; None if the database follows no other one."""
        with self.reading() as connection:
            return replica_of(connection, self.kind, self.now_us)

    def purged(self) -> tuple[int, int]:
        """The instants (microseconds) before which local rows, and inbox rows, may be purged; 0: nothing was purged."""
        if notify_source.name not in self.tables:
            return 0, 0
        columns = notify_source.c
        with self.reading() as connection:
            row = connection.execute(sa.select(columns.purged_before, columns.rows_from, columns.inbox_from)).first()
        return (0, 0) if row is None else (max(row[0], row[1]) * 1000, row[2] * 1000)

    def rows(self, query: str) -> Sequence[sa.Row[Any]]:
        """The rows of a query."""
        with self.reading() as connection:
            return connection.exec_driver_sql(query).all()

    def has_rows(self, table: sa.Table) -> bool:
        """Whether a table has any row."""
        if table.name not in self.tables:
            return False
        with self.reading() as connection:
            return connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None

    def producer_groups(self, span: Span | None = None) -> set[str]:
        """The producer groups of all local rows, or of those with ids made in `span`, which avoids a full scan."""
        if span is None or half_message.name not in self.tables:
            return self._distinct(half_message.c.producer_group)
        columns = half_message.c
        within = (columns.transaction_id >= id_at(span.start_us), columns.transaction_id < id_at(span.end_us))
        query = sa.select(columns.producer_group).where(*within).distinct()
        with self.reading() as connection:
            return {str(row[0]) for row in connection.execute(query)}

    def inbox_groups(self) -> set[str]:
        """The consumer groups that have inbox rows in this database."""
        return self._distinct(notify_inbox.c.consumer_group)

    def _distinct(self, column: sa.Column[Any]) -> set[str]:
        """The distinct values of a column. If the column begins a key, each value takes one search in the index."""
        table, name = column.table.name, column.name
        if table not in self.tables:
            return set()
        if column.primary_key:
            query = (
                f"WITH RECURSIVE names(name) AS (SELECT min({name}) FROM {table} UNION ALL SELECT "
                f"(SELECT min({name}) FROM {table} WHERE {name} > names.name) FROM names WHERE names.name IS NOT NULL) "
                "SELECT name FROM names WHERE name IS NOT NULL"
            )
        else:
            query = f"SELECT DISTINCT {name} FROM {table}"
        with self.reading() as connection:
            return {str(row[0]) for row in connection.exec_driver_sql(query)}

    # --- tables -----------------------------------------------------------------------------------------------

    def local_rows(self, spark: SparkSession, span: Span | None, drill: Drill | None = None) -> DataFrame | None:
        """Rows of half_message with ids made in `span`, or those of the drill; None if there is no such table.

        Columns: id, no, producer_group, is_outbox, unmoved (spark.unmoved), state (1 COMMITTED, 2 ROLLED_BACK, 3 not
        known), topic, digest, at_us.
        """
        if half_message.name not in self.tables:
            return None
        if drill is None:
            edges, odd = self.parts.by_id(half_message.c.transaction_id, span), self.odd_ids(half_message, span)
            is_sound = f"{self._sql.is_id('transaction_id')} AND {self._sql.is_instant('created_at')}"
            guarded = bool(odd) or self._has_odd(half_message.name, "transaction_id", edges, is_sound)
            conditions = conditions_of("transaction_id", edges) + odd
        else:
            conditions, guarded = drill.conditions("transaction_id"), self._sql.is_strict
        columns = (
            f"{self._sql.id_bytes('transaction_id', guarded=guarded)} AS id, message_no AS no, producer_group, "
            f"CASE WHEN mode = 'outbox' THEN 1 ELSE 0 END AS is_outbox, {UNMOVED_SQL} AS unmoved, "
            "CASE state WHEN 'COMMITTED' THEN 1 WHEN 'ROLLED_BACK' THEN 2 ELSE 3 END AS state, "
            f"topic, {self._sql.microseconds('created_at')} AS at_us, transaction_id"
        )
        schema = "id binary, no int, producer_group string, is_outbox int, unmoved int, state int, topic string, "
        schema += "at_us bigint"
        if self.has_digests:
            columns += f", digest, {hashes.quoted_key(self.kind)}, tag"
            schema += ", digest bigint, key string, tag string"
        rows = _with_ids(self._read(spark, half_message.name, columns, conditions, schema).drop("transaction_id"))
        rows = rows.where(F.col("no").between(0, MOST_NUMBER))  # malformed.py reports the others
        if not self.has_digests:
            return rows.withColumn("digest", F.lit(None).cast("bigint"))
        return rows.withColumn("digest", hashes.of_local_contents()).drop("key", "tag")

    def transactions(self, spark: SparkSession, span: Span | None, condition: str) -> DataFrame:
        """(id): the transactions whose rows of half_message have ids made in `span` and meet the condition."""
        edges = self.parts.by_id(half_message.c.transaction_id, span)
        within = conditions_of("transaction_id", edges) + self.odd_ids(half_message, span)
        conditions = [f"({part}) AND {condition}" for part in within]
        id_bytes = self._sql.id_bytes("transaction_id", guarded=self._sql.is_strict)
        columns = f"{id_bytes} AS id, transaction_id, state, shards"
        return _with_ids(self._read(spark, half_message.name, columns, conditions, "id binary").select("id"))

    def effects(self, spark: SparkSession, span: Span | None, drill: Drill | None = None) -> DataFrame | None:
        """Rows of notify_inbox written from the start of `span` on, or those of the drill; None without the table.

        Columns: id, no, consumer_group, replay, at_us.
        """
        if notify_inbox.name not in self.tables:
            return None
        if drill is None:
            edges = self.parts.by_time(notify_inbox.c.created_at, span)
            is_sound = f"{self._sql.is_message_id('message_id')} AND {self._sql.is_instant('created_at')}"
            guarded = self._has_odd(notify_inbox.name, "created_at", edges, is_sound)
            conditions = conditions_of("created_at", edges) + self.undated(span)
        else:
            conditions, guarded = self._drilled_effects(drill, span), self._sql.is_strict
        number = self._sql.message_number("message_id", guarded=guarded)
        columns = (
            f"{self._sql.id_bytes('message_id', guarded=guarded)} AS id, {number} AS no, "
            f"consumer_group, replay, {self._sql.microseconds('created_at')} AS at_us, message_id, created_at"
        )
        schema = "id binary, no int, consumer_group string, replay int, at_us bigint"
        rows = self._read(spark, notify_inbox.name, columns, conditions, schema)
        return _with_ids(rows.drop("message_id", "created_at"))

    def _drilled_effects(self, drill: Drill, span: Span | None) -> list[str]:
        """Conditions for inbox rows. They name the groups, because the table's key begins with the group."""
        listed = ", ".join("'" + group.replace("'", "''") + "'" for group in sorted(self.inbox_groups()))
        among = f"consumer_group IN ({listed}) AND " if listed else ""
        if span is not None:
            is_undated = self._sql.is_no_instant("created_at")
            among += f"(created_at >= '{text_of(span.start_us)}' OR {is_undated}) AND "
        return [f"{among}({condition})" for condition in drill.conditions("message_id")]

    def doubled(self, spark: SparkSession, query: str, between: Span | None = None) -> DataFrame:
        """(message_id, consumer_group, times) of effects that `query` returns more than once.

        `between`: only ids of that time, and texts that are no id.
        `query` returns a column `message_id`, and `consumer_group` if the database has effects of several groups.
        """
        try:
            with self.reading() as connection:
                columns = list(connection.exec_driver_sql(f"SELECT * FROM ({query}) q WHERE 1 = 0").keys())
        except sa.exc.SQLAlchemyError as error:
            kind = Unavailable if is_gone(getattr(error, "orig", None)) else InvalidRequest
            raise kind(f"--effects on database {self.name}: {reason_of(error)}") from None
        if "message_id" not in columns:
            raise InvalidRequest(
                f"the query of --effects must return a column message_id; it returns {', '.join(columns)}"
            )
        group = "consumer_group" if "consumer_group" in columns else "''"
        keys = "message_id, consumer_group" if "consumer_group" in columns else "message_id"
        where = ""
        if between is not None:
            where = f"WHERE {' OR '.join(between.within('message_id') + between.odd('message_id'))} "
        return self._jdbc(
            spark,
            f"(SELECT message_id, {group} AS consumer_group, COUNT(*) AS times FROM ({query}) q {where}GROUP BY {keys} "
            "HAVING COUNT(*) > 1) counted",
            "message_id string, consumer_group string, times bigint",
        )

    def halves(self, spark: SparkSession, span: Span | None) -> DataFrame | None:
        """Rows of server_half_message; None without the table.

        Columns: id, no, producer_group, state, topic, source (the name that the sender gives for the half's database),
        half_us, relayed (as in the table), decided_us.
        """
        if server_half_message.name not in self.tables:
            return None
        columns = (
            f"{self._sql.id_bytes('transaction_id', guarded=False)} AS id, message_no AS no, producer_group, state, "
            f"topic, source, {self._sql.microseconds('created_at')} AS half_us, relayed, "
            f"{self._sql.microseconds('decided_at')} AS decided_us, transaction_id"
        )
        conditions = conditions_of("transaction_id", self.parts.by_id(server_half_message.c.transaction_id, span))
        conditions += self.odd_ids(server_half_message, span)
        schema = "id binary, no int, producer_group string, state string, topic string, source string, half_us bigint, "
        schema += "relayed int, decided_us bigint"
        return self._read(spark, server_half_message.name, columns, conditions, schema).drop("transaction_id")

    def sent(self, span: Span) -> dict[str, dict[str, int]]:
        """By database id and producer group: when the last committed half was stored."""
        if server_half_message.name not in self.tables:
            return {}
        columns = server_half_message.c
        within = (columns.transaction_id >= id_at(span.start_us), columns.transaction_id < id_at(span.end_us))
        sender = (columns.source, columns.producer_group)
        newest = sa.select(*sender, sa.func.max(columns.created_at)).group_by(*sender)
        last: dict[str, dict[str, int]] = {}
        with self.reading() as connection:
            for name, group, at in connection.execute(newest.where(columns.state == "COMMITTED", *within)):
                if source := source_of(name):
                    last.setdefault(source, {})[group] = microseconds_of(at)
        return last

    def rows_of(self, transaction_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The local rows of some transactions, with bodies, for evidence and repairs."""
        return self._rows(half_message, half_message.c.transaction_id.in_(transaction_ids))

    def halves_of(self, transaction_id: str) -> list[dict[str, Any]]:
        """A transaction's rows of server_half_message."""
        return self._rows(server_half_message, server_half_message.c.transaction_id == transaction_id)

    def inbox_of(self, message_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The inbox rows of some messages."""
        return self._rows(notify_inbox, notify_inbox.c.message_id.in_(message_ids))

    def inbox_count(self, group: str, most: int) -> int:
        """How many inbox rows a group has; `most` + 1 if there are more than `most`."""
        if notify_inbox.name not in self.tables:
            return 0
        of_group = sa.select(sa.literal(1)).select_from(notify_inbox).where(notify_inbox.c.consumer_group == group)
        with self.reading() as connection:
            query = sa.select(sa.func.count()).select_from(of_group.limit(most + 1).subquery())
            return int(connection.execute(query).scalar_one())

    def _rows(self, table: sa.Table, condition: sa.ColumnElement[bool]) -> list[dict[str, Any]]:
        if table.name not in self.tables:
            return []
        with self.reading() as connection:
            present = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
            # A table that an older version made has fewer columns.
            columns: list[sa.ColumnElement[Any]] = [column for column in table.c if column.name in present]
            is_instant = sa.literal_column(self._sql.is_instant("created_at"), sa.Boolean())
            # Drivers fail on a value that is not a time, so the query turns it into NULL.
            columns.append(sa.case((is_instant, table.c.created_at)).label("created_at"))
            columns.remove(table.c.created_at)
            return [dict(row) for row in connection.execute(sa.select(*columns).where(condition)).mappings()]

    # --- queries ----------------------------------------------------------------------------------------------

    def odd_ids(self, table: sa.Table, span: Span | None) -> list[str]:
        """Conditions for the rows whose ids have no time, or are in upper case and have a time of the span.

        Conditions that no row meets are left out.
        """
        conditions = [*span.odd("transaction_id"), *span.upper_case("transaction_id")] if span is not None else []
        return [where for where in conditions if self.rows(f"SELECT 1 FROM {table.name} WHERE {where} LIMIT 1")]

    def undated(self, span: Span | None) -> list[str]:
        """A condition for the inbox rows with ids of the span whose `created_at` is no time and sorts before the span.

        The list is empty if there is no such row.
        """
        if span is None:
            return []
        condition = (
            f"{self._sql.is_no_instant('created_at')} AND created_at < '{text_of(span.start_us)}' "
            f"AND ({' OR '.join(span.within('message_id'))})"
        )
        has_any = self.rows(f"SELECT 1 FROM {notify_inbox.name} WHERE {condition} LIMIT 1")
        return [condition] if has_any else []

    def _has_odd(self, table: str, column: str, edges: Sequence[str], is_sound: str) -> bool:
        """Whether a row between the first and the last edge is not sound, and the database cannot convert such rows."""
        if not self._sql.is_strict:
            return False
        has_odd = any(
            self.rows(f"SELECT 1 FROM {table} WHERE {part} AND NOT ({is_sound}) LIMIT 1")
            for part in conditions_of(column, edges)
        )
        if not has_odd and not edges[0] and not edges[-1]:
            self.sound.add(table)
        return has_odd

    def _read(self, spark: SparkSession, table: str, columns: str, conditions: list[str], schema: str) -> DataFrame:
        self.pace.wait()
        return jdbc.read_parts(
            spark, self.url, self.kind, (columns, table), conditions, schema,
            encrypted=self._is_encrypted, most_lag_us=self._most_lag_us,
        )  # fmt: skip

    def _jdbc(self, spark: SparkSession, table: str, schema: str) -> DataFrame:
        return jdbc.read(spark, self.url, self.kind, table, schema, encrypted=self._is_encrypted)


def _with_ids(rows: DataFrame) -> DataFrame:
    """The rows whose id is a UUID of version 7; malformed.py reports the others."""
    version = F.substring("id", 7, 1)
    return rows.where((F.length("id") == 16) & (version >= F.lit(b"\x70")) & (version < F.lit(b"\x80")))
