"""Databases as tables that Spark reads by JDBC, in parts: local rows, inbox effects, and the halves of SQL storage.

The database converts ids to 16 bytes and times to microseconds since 1970, because the timestamps that Spark reads from
a driver depend on time zones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy.engine.url import URL

from notify.client.tables.definitions import WITHOUT_ROWS_MS, half_message, notify_inbox, notify_source
from notify.errors import HiddenRows, InvalidRequest, Unavailable
from notify.movers.outbox import READS
from notify.runtime.databases import database_now, reason_of
from notify.runtime.guarantees import faults
from notify.runtime.schemas import found_in, with_table
from notify.runtime.urls import without_secrets
from notify.spark.checks.outbox_waiting import UNMOVED_SQL
from notify.spark.digest import hashes
from notify.spark.digest.drill import Drill
from notify.spark.inputs import jdbc, jdbc_urls
from notify.spark.inputs.columns import source_of
from notify.spark.inputs.expressions import MOST_NUMBER, Expressions
from notify.spark.inputs.hidden import hidden_by_grants, hidden_by_policies, unreadable
from notify.spark.inputs.pacing import Pace
from notify.spark.inputs.query_bounds import READ_SECONDS, bounded
from notify.spark.inputs.ranges import Span, conditions_of, id_at
from notify.spark.inputs.replicas import Replica, replica_of
from notify.spark.inputs.table_parts import TableParts
from notify.storage.sql.engines import open_engine
from notify.storage.sql.rows import microseconds_of, text_of
from notify.storage.sql.schema import check_version
from notify.storage.sql.tables import server_half_message

_OF_A_SERVICE = (half_message, notify_inbox, notify_source)


class Database:
    """One schema of a database, given by the database's SQLAlchemy URL.

    Raises InvalidRequest if the URL or the tables cannot be read, StorageFailed if a server's tables have another
    version, and Unavailable if the database does not answer.
    """

    def __init__(
        self,
        url: str,
        name: str = "",
        most_lag_seconds: float = 0.0,
        *,
        schema: str = "",
        given: str = "",
        is_storage: bool = False,
    ) -> None:
        """`most_lag_seconds`: each read waits until a copy lags by no more than this; 0: it does not wait. `schema`:
        the one that a service's tables are in; "": where the connection finds them. `given`: the name that its flag
        has, if several schemas share the flag. `is_storage`: whether it is read for the tables of servers."""
        named = f"{'--storage' if is_storage else '--database'} {name}".rstrip()
        # No pool: this process runs few statements, far apart.
        self._engine = open_engine(
            jdbc_urls.checked(url, named), named=named, pooled=False, statement_seconds=READ_SECONDS
        )
        self.url: URL = self._engine.url
        if self.url.get_backend_name() == "sqlite":
            sa.event.listen(self._engine, "connect", reads_any_text)
        jdbc_urls.check_driver(self._engine, named)
        self.kind = "mysql" if self.url.get_backend_name() == "mariadb" else self.url.get_backend_name()
        self._sql = Expressions(self.kind)
        self.parts = TableParts(self.kind, self.reading, self.in_schema)
        self._most_lag_us = round(most_lag_seconds * 1e6)
        self._wanted = {need.table.name for need in READS if (need.table in _OF_A_SERVICE) != is_storage}
        """The tables to read, as far as they are there."""
        self.pace = Pace(name or without_secrets(url), self._most_lag_us, self.replica, lambda: self.now_us)
        """Waits if this database is a copy that lags too much."""
        self.sound: set[str] = set()
        """The tables of which it is known that every id is well-formed."""
        self.name = name or self.url.database or self.kind
        self.given = given or self.name
        self.shown_url = without_secrets(url)
        self.named_schema = schema
        """The schema, if a flag named it."""
        try:
            # No transactions: those of SQLite would begin with the writer's lock (`use_explicit_begin`).
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                self.address = jdbc_urls.address_of(connection, named)
                """How Spark reaches what this connection reached."""
                jdbc_urls.keep_to_one(self._engine, connection)
                self.schema = schema or self._schema(connection, is_storage=is_storage)
                """The schema that every statement names."""
                if not self.schema:
                    raise InvalidRequest(
                        f"{named}: the connection has no schema, or no database: name the one of the service's tables "
                        "with --schema"
                    )
                if "%" in self.schema:  # drivers in Python take it for the beginning of a parameter
                    raise InvalidRequest(f"{named}: an audit cannot read the schema {self.schema!r}: rename it")
                self._engine = self._engine.execution_options(schema_translate_map={None: self.schema})
                self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
                connection.execution_options(schema_translate_map={None: self.schema})
                self.tables = self._tables(connection)
                """Those of the schema; if one was named, a service's alone."""
                if schema:
                    self.tables &= {table.name for table in _OF_A_SERVICE}
                    if not self.tables:
                        raise InvalidRequest(
                            f"{named}: schema {schema} has no table {half_message.name} or {notify_inbox.name} that "
                            "this user may see: name another one with --schema, or make the tables with create_tables"
                        )
                now = connection.execute(sa.select(database_now())).scalar_one()
                self.clock_offset_us = microseconds_of(str(now)[:26]) - time.time_ns() // 1000
                self._opened_us = self.now_us
                needs = [need for need in READS if need.table.name in self.tables]
                kind = "storage" if is_storage else "database"
                there = [need.table for need in needs]
                self._denied = unreadable(connection, self.kind, self.schema, there, self.in_schema)
                """The columns that this user may not read, by table."""
                why = [str(fault) for fault in faults(connection, needs, self.schema)]
                why += hidden_by_grants(connection, self.kind, self._denied, self.in_schema)
                self.hidden = [f"{kind} {self.name}: {each}" for each in why]
                """Why rows or values may be there that this user does not see: nothing can be said of them then."""
                self._check(connection)
                self.has_digests = half_message.name in self.tables and half_message.c.digest.name in self._columns(
                    connection, half_message
                )
            if server_half_message.name in self.tables and not self.hidden:
                check_version(self._reading, exactly=True)
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(f"database {self.name}: {reason_of(error)}") from None

    def _schema(self, connection: sa.Connection, *, is_storage: bool) -> str:
        """The schema in which the connection finds Notify's tables, else the one in which it would make them."""
        tables = (server_half_message, *_OF_A_SERVICE) if is_storage else (*_OF_A_SERVICE, server_half_message)
        found = (found_in(connection, table.name) for table in tables)
        return next(filter(None, found), "") or str(sa.inspect(connection).default_schema_name or "")

    def _tables(self, connection: sa.Connection) -> set[str]:
        """The tables and views of the schema."""
        if self.kind == "mysql":
            # SQLAlchemy's reading of it leaves out tables with SYSTEM VERSIONING.
            schema = connection.dialect.identifier_preparer.quote_identifier(self.schema)
            return set(connection.exec_driver_sql(f"SHOW TABLES FROM {schema}").scalars())
        inspector = sa.inspect(connection)
        return {*inspector.get_table_names(self.schema), *inspector.get_view_names(self.schema)}

    def in_schema(self, table: str) -> str:
        """A table's name in SQL, with that of its schema: the same one by every connection."""
        quote = self._engine.dialect.identifier_preparer.quote_identifier
        return f"{quote(self.schema)}.{quote(table)}"

    @property
    def quoted_schema(self) -> str:
        """The schema's name in SQL."""
        return str(self._engine.dialect.identifier_preparer.quote_identifier(self.schema))

    def _check(self, connection: sa.Connection) -> None:
        """Raises InvalidRequest if a table lacks columns."""
        for table in _OF_A_SERVICE:
            if table.name not in self.tables:
                continue
            present = self._columns(connection, table) | self._denied.get(table.name, frozenset())
            missing = {column.name for column in table.columns if not column.nullable} - present
            if missing:
                raise InvalidRequest(
                    f"database {self.name}: the table {table.name} lacks {', '.join(sorted(missing))}: an older "
                    "version made it; run create_tables or the Alembic helper's upgrade (docs/reference.md)"
                )

    def _columns(self, connection: sa.Connection, table: sa.Table) -> set[str]:
        """The columns of a table that this user may see."""
        if self.kind == "mysql":
            # SQLAlchemy's reading of it needs a right to the whole table.
            return set(connection.exec_driver_sql(f"SHOW COLUMNS FROM {self.in_schema(table.name)}").scalars())
        return {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=self.schema)}

    def mistyped(self, table: sa.Table) -> dict[str, str]:
        """By column: the condition for a value of another type than the column's, which only SQLite keeps.

        A row's state is left out: it is looked at with its message."""
        if self.kind != "sqlite":
            return {}
        names = self._present(table) - {"state", "created_at"}
        return {column.name: f"NOT {self._sql.is_typed(column)}" for column in table.c if column.name in names}

    def _present(self, table: sa.Table) -> set[str]:
        with self.reading() as connection:
            return self._columns(connection, table)

    def close(self) -> None:
        self._engine.dispose()

    def check_seen(self) -> None:
        """Raises HiddenRows if rows may be there that this user does not see."""
        for reason in self.hidden:
            raise HiddenRows(reason)

    def hidden_from(self, query: str) -> list[str]:
        """Why a query of the user's may not see all rows of what it reads. Only PostgreSQL hides rows."""
        if self.kind != "postgresql":
            return []
        with bounded(self.name):
            return list(hidden_by_policies(self.connect, query))

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
            return replica_of(connection, self.kind, self.now_us, self.schema, self._wanted)

    @property
    def is_unmarked(self) -> bool:
        """Whether nothing says what was purged of the inbox: nobody wrote the marks, or this user may not see them."""
        return notify_inbox.name in self.tables and self._marks() is None

    def _marks(self) -> Sequence[Any] | None:
        """The marks of purges: of local rows, of the rows that are kept, and of inbox rows. None: there are none."""
        if notify_source.name not in self.tables:
            return None
        columns = notify_source.c
        with self.reading() as connection:
            return connection.execute(sa.select(columns.purged_before, columns.rows_from, columns.inbox_from)).first()

    @property
    def is_without_rows(self) -> bool:
        """Whether producers write no rows here (`rows=False`), with which messages could be compared."""
        row = self._marks()
        return row is not None and isinstance(row[1], int) and row[1] >= WITHOUT_ROWS_MS

    def purged(self) -> tuple[int, int]:
        """The instants (microseconds) before which local rows, and inbox rows, may be purged; 0: nothing was purged.

        All inbox rows may be purged if the database is unmarked."""
        row = self._marks()
        if row is None:
            return 0, self._opened_us if notify_inbox.name in self.tables else 0
        marks = [mark if isinstance(mark, int) else 0 for mark in row]  # malformed.py reports the others
        return max(marks[0], marks[1]) * 1000, marks[2] * 1000

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
        if column.table.name not in self.tables:
            return set()
        table, name = self.in_schema(column.table.name), column.name
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

        Columns: id, no, producer_group, is_outbox, unmoved (spark.checks.outbox_waiting), state (1 COMMITTED, 2
        ROLLED_BACK, 3 not known), topic, digest, at_us.
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
            f"{self._sql.id_bytes('transaction_id', guarded=guarded)} AS id, "
            f"{self._sql.number('message_no')} AS no, producer_group, "
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

    def effects_in(
        self, spark: SparkSession, table: str, group: str, span: Span | None, drill: Drill | None
    ) -> DataFrame:
        """(id, no, consumer_group) of the messages in a subquery with a column `message_id`.

        Only those with ids made in `span`, or of the drill. `group`: the SQL of the consumer group."""
        if drill is not None:
            conditions = drill.conditions("message_id")
        elif self.has_rows(notify_inbox):  # the same messages: so the same parts
            conditions = conditions_of("message_id", self.parts.by_id(notify_inbox.c.message_id, span))
            conditions += span.odd("message_id") if span is not None else []
        else:
            conditions = ["1 = 1"] if span is None else span.within("message_id") + span.odd("message_id")
        is_sound = self._sql.is_message_id("message_id")
        columns = (
            f"{self._sql.id_bytes('message_id', guarded=True)} AS id, "
            f"{self._sql.message_number('message_id', guarded=True)} AS no, {group} AS consumer_group, message_id"
        )
        self.pace.wait()
        return jdbc.read_parts(
            spark, self.address, self.kind, (columns, table), [f"({part}) AND {is_sound}" for part in conditions],
            "id binary, no int, consumer_group string", most_lag_us=self._most_lag_us,
        ).select("id", "no", "consumer_group")  # fmt: skip

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
            present = self._columns(connection, table)
            # A table that an older version made has fewer columns.
            denied = self._denied.get(table.name, frozenset())
            columns: list[sa.ColumnElement[Any]] = [
                sa.null().label(column.name) if column.name in denied else column
                for column in table.c
                if column.name in present | denied and column.name != "created_at"
            ]
            is_instant = sa.literal_column(self._sql.is_instant("created_at"), sa.Boolean())
            # Drivers fail on a value that is not a time, so the query turns it into NULL.
            columns.append(sa.case((is_instant, table.c.created_at)).label("created_at"))
            if self.kind == "sqlite":  # SQLAlchemy fails on a value of another type
                columns = [sa.type_coerce(column, sa.types.NullType()).label(column.name) for column in columns]
            rows = [dict(row) for row in connection.execute(sa.select(*columns).where(condition)).mappings()]
        if self.kind == "sqlite":
            rows = [row for row in rows if _made_plain(table, row)]
        return [row for row in rows if 0 <= row.get("message_no", 0) <= MOST_NUMBER]  # malformed.py reports the others

    # --- queries ----------------------------------------------------------------------------------------------

    def odd_ids(self, table: sa.Table, span: Span | None) -> list[str]:
        """Conditions for the rows whose ids have no time, or are in upper case and have a time of the span.

        Conditions that no row meets are left out.
        """
        conditions = [*span.odd("transaction_id"), *span.upper_case("transaction_id")] if span is not None else []
        name = self.in_schema(table.name)
        return [where for where in conditions if self.rows(f"SELECT 1 FROM {name} WHERE {where} LIMIT 1")]

    def undated(self, span: Span | None) -> list[str]:
        """A condition for the inbox rows with ids of the span whose `created_at` is not a time and sorts before the
        span.

        The list is empty if there is no such row.
        """
        if span is None:
            return []
        condition = (
            f"{self._sql.is_no_instant('created_at')} AND created_at < '{text_of(span.start_us)}' "
            f"AND ({' OR '.join(span.within('message_id'))})"
        )
        has_any = self.rows(f"SELECT 1 FROM {self.in_schema(notify_inbox.name)} WHERE {condition} LIMIT 1")
        return [condition] if has_any else []

    def _has_odd(self, table: str, column: str, edges: Sequence[str], is_sound: str) -> bool:
        """Whether a row between the first and the last edge is not sound, and the database cannot convert such rows."""
        if not self._sql.is_strict:
            return False
        has_odd = any(
            self.rows(f"SELECT 1 FROM {self.in_schema(table)} WHERE {part} AND NOT ({is_sound}) LIMIT 1")
            for part in conditions_of(column, edges)
        )
        if not has_odd and not edges[0] and not edges[-1]:
            self.sound.add(table)
        return has_odd

    def _read(self, spark: SparkSession, table: str, columns: str, conditions: list[str], schema: str) -> DataFrame:
        self.pace.wait()
        return jdbc.read_parts(
            spark, self.address, self.kind, (columns, self.in_schema(table)), conditions, schema,
            most_lag_us=self._most_lag_us,
        )  # fmt: skip

    def read_query(self, spark: SparkSession, table: str, schema: str) -> DataFrame:
        """The rows of a subquery, read at once. `schema`: Spark's types of its columns."""
        return jdbc.read(spark, self.address, self.kind, table, schema)


def reads_any_text(connection: Any, record: Any) -> None:
    """Read a text of SQLite that is not UTF-8, as Spark's driver does: with marks in place of its odd bytes."""
    connection.text_factory = lambda data: data.decode(errors="replace")


ODD = "odd"
"""In a row of SQLite: the names of its columns whose values have another type. They are replaced by plain ones."""


def _made_plain(table: sa.Table, row: dict[str, Any]) -> bool:
    """Convert the values of an SQLite row to their types, and note under ODD which had others; False if its id or its
    number is invalid, so that it does not belong to a message."""
    odd = []
    for column in table.c:
        name, value = column.name, row.get(column.name)
        if value is None:
            if not column.nullable and name in row and name != "created_at":
                odd.append(name)
                row[name] = "" if isinstance(column.type, sa.String) else 0
            continue
        if isinstance(column.type, sa.DateTime):
            try:
                row[name] = datetime.fromisoformat(value).replace(tzinfo=None)
            except (TypeError, ValueError):
                odd.append(name)
                row[name] = None
        elif not isinstance(value, _TYPES[column.type.python_type]) or isinstance(value, bool):
            odd.append(name)
            row[name] = str(value) if isinstance(column.type, sa.String) else None if column.nullable else -1
    row[ODD] = odd
    return not {"message_no", "transaction_id", "message_id"} & set(odd)


_TYPES: dict[type, tuple[type, ...]] = {str: (str,), bytes: (bytes,), int: (int,), float: (float, int)}


def schemas_in(url: str, named: str, patterns: str) -> list[str]:
    """The schemas of a database that have a service's tables, and whose names match one of the patterns (`t_*,public`).

    `named`: the flag that has the URL. Raises InvalidRequest if there is none, and Unavailable if the database does not
    answer.
    """
    engine = open_engine(jdbc_urls.checked(url, named), named=named, pooled=False)
    try:
        with engine.connect() as connection:
            found = set(with_table(connection, half_message.name, patterns))
            found |= set(with_table(connection, notify_inbox.name, patterns))
    except sa.exc.SQLAlchemyError as error:
        raise Unavailable(f"{named}: {reason_of(error)}") from None
    finally:
        engine.dispose()
    if not found:
        raise InvalidRequest(
            f"{named}: no schema matches {patterns!r} and has a table {half_message.name} or {notify_inbox.name} that "
            "this user may see: write another pattern in --schemas"
        )
    return sorted(found)


def _with_ids(rows: DataFrame) -> DataFrame:
    """The rows whose id is a UUID of version 7; malformed.py reports the others."""
    version = F.substring("id", 7, 1)
    return rows.where((F.length("id") == 16) & (version >= F.lit(b"\x70")) & (version < F.lit(b"\x80")))
