"""Business effects, found by the queries of `--effects`: like inboxes, they prove what took effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

from notify.errors import HiddenRows, InvalidRequest, Unavailable
from notify.runtime.databases import is_gone, reason_of
from notify.runtime.guarantees import sorts_by_bytes
from notify.spark.digest.drill import Drill
from notify.spark.inputs.databases import Database
from notify.spark.inputs.expressions import Expressions
from notify.spark.inputs.ranges import Span

UNNAMED = ""
"""The consumer group of an effect of which nothing says whose it is."""
SAMPLED = 1000
"""So many effects are asked for their ids, to see whether the query names messages at all."""
MOST_NAMED = 20
"""The most unknown groups that are named."""
_TEXTS = {"text", "varchar"}
_MARKS = re.compile(
    r"""\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|(\$\w*\$).*?\1|--[^\n]*|/\*.*?\*/|\?""", re.DOTALL
)
"""The parts of a query that PostgreSQL takes as they are written, and question marks."""


class BusinessEffects:
    """One query, on one database. Raises InvalidRequest for a query that the database refuses, or without a column
    `message_id`; Unavailable where the database does not answer."""

    def __init__(self, database: Database, query: str) -> None:
        """`query` returns a column `message_id`, and `consumer_group` if the database has effects of several groups. In
        it `{schema}` stands for this database's schema."""
        self.database = database
        asked = query.replace("{schema}", database.quoted_schema).rstrip().rstrip(";") + "\n"  # may end in a comment
        columns = self._columns(f"SELECT * FROM ({asked}) q WHERE 1 = 0")
        if "message_id" not in columns:
            raise InvalidRequest(
                f"the query of --effects must return a column message_id; it returns {', '.join(columns)}"
            )
        groups = sorted(group for group in database.inbox_groups() if "@" not in group)
        self._only_group = groups[0] if len(groups) == 1 else UNNAMED
        """The group of all effects where the query names none: the only one that keeps its inbox there."""
        with self._asked():
            hidden = database.hidden_from(self._escaped(asked))
        self.hidden = [f"--effects on database {database.name}: {why}" for why in hidden]
        """Why effects may be there that this user does not see."""
        self.names_groups = "consumer_group" in columns
        group = self._text("consumer_group", columns, asked) if self.names_groups else "''"
        self._table = (
            f"(SELECT {self._text('message_id', columns, asked)} AS message_id, message_id AS as_it_is, "
            f"{group} AS consumer_group FROM ({asked}) q "
            "WHERE message_id IS NOT NULL) e"
        )

    def _columns(self, query: str) -> dict[str, object]:
        """The names of a query's columns, and what the driver says of their types."""
        with self._asked(), self.database.reading() as connection:
            cursor = connection.exec_driver_sql(self._escaped(query)).cursor
            return {column[0]: column[1] for column in cursor.description or ()} if cursor is not None else {}

    def _text(self, name: str, columns: dict[str, object], asked: str) -> str:
        """A column as text, compared byte by byte. One of PostgreSQL stays as it is, so that an index of it serves,
        unless its collation sorts ids otherwise."""
        if self.database.kind == "sqlite":
            return f"CAST({name} AS TEXT) COLLATE BINARY"
        if self.database.kind == "mysql":
            return f"CONVERT({name} USING utf8mb4) COLLATE utf8mb4_bin"
        from psycopg.postgres import types

        known = types.get(int(str(columns[name])))
        if known is not None and known.name in _TEXTS:
            return name if self._sorts_by_bytes(name, asked) else f'{name} COLLATE "C"'
        return f"encode({name}, 'escape')" if known is not None and known.name == "bytea" else f"CAST({name} AS text)"

    def _sorts_by_bytes(self, name: str, asked: str) -> bool:
        query = f"SELECT pg_collation_for({name}) FROM (SELECT 1) one LEFT JOIN ({asked}) q ON false"
        ((collation,),) = self._rows(query)
        with self._asked(), self.database.reading() as connection:
            return sorts_by_bytes(connection, "" if collation == '"default"' else collation)

    @property
    def is_unnamed(self) -> bool:
        """Whether nothing says whose the effects are."""
        return not self.names_groups and not self._only_group

    def check_seen(self) -> None:
        """Raises HiddenRows if effects may be there that this user does not see."""
        for reason in self.hidden:
            raise HiddenRows(reason)

    def doubts(self, known_groups: Collection[str] = ()) -> Iterator[str]:
        """Why the query proves no effect of a group, in sentences. `known_groups`: those of the queues and inboxes."""
        if odd := self._no_message():
            yield (
                f"--effects on database {self.database.name} proves nothing: none of its first message_ids is that of "
                f"a message, such as {odd!r}; return the message.id that handlers received"
            )
        elif self.is_unnamed:
            yield (
                f"--effects on database {self.database.name} proves no effect of a group: several groups, or none, "
                "have an inbox there, and the query returns no column consumer_group"
            )

        elif self.names_groups and (unknown := self._groups() - set(known_groups)):
            named = ", ".join(map(repr, sorted(unknown)[:MOST_NAMED]))
            yield (
                f"--effects on database {self.database.name} names consumer groups that no queue and no inbox knows, "
                f"and proves no effect in these: {named}"
            )

    def _groups(self) -> set[str]:
        """The consumer groups that the query names for its first effects."""
        first = f"SELECT consumer_group FROM {self._table} LIMIT {SAMPLED}"
        return {_decoded(group) for (group,) in self._rows(f"SELECT DISTINCT consumer_group FROM ({first}) sample")}

    def _no_message(self) -> str:
        """An id of the first effects if none of them is a message's; "" if one is, or there is no effect."""
        first = f"SELECT message_id FROM {self._table} LIMIT {SAMPLED}"
        is_sound = Expressions(self.database.kind).is_message_id("message_id")
        rows = self._rows(f"SELECT message_id, CASE WHEN {is_sound} THEN 1 ELSE 0 END FROM ({first}) sample")
        return "" if any(is_id for _, is_id in rows) or not rows else _decoded(rows[0][0])[:60]

    def doubled(self, spark: SparkSession, between: Span | None = None) -> DataFrame:
        """(message_id, consumer_group, times) of effects that the query returns more than once.

        `between`: only ids of that time, and texts that are not ids.
        """
        # MySQL fills a CHAR with spaces where its session is told to.
        name = "RTRIM(message_id)" if self.database.kind == "mysql" else "message_id"
        where = ""
        if between is not None:
            where = f"WHERE {' OR '.join(between.within('message_id') + between.odd('message_id'))} "
        return self.database.read_query(
            spark,
            f"(SELECT {name} AS message_id, consumer_group, COUNT(*) AS times FROM {self._for_spark(self._table)} "
            f"{where}"
            f"GROUP BY {name}, consumer_group HAVING COUNT(*) > 1) counted",
            "message_id string, consumer_group string, times bigint",
        )

    def proven(self, spark: SparkSession, span: Span | None, drill: Drill | None) -> DataFrame | None:
        """(id, no, consumer_group) of the effects of messages with ids of `span`, or of the drill; None where nothing
        says whose they are."""
        if self.is_unnamed:
            return None
        group = "consumer_group" if self.names_groups else _quoted(self._only_group)
        return self.database.effects_in(spark, self._for_spark(self._table), group, span, drill)

    def of(self, message_ids: Iterable[str]) -> dict[str, set[str]]:
        """By message id: the groups in which it took effect, UNNAMED for one that is not known."""
        wanted = sorted(set(message_ids))
        listed = ", ".join(map(_quoted, wanted))
        found: dict[str, set[str]] = {}
        if wanted:
            # MySQL compares any type with a text, and so uses an index of it.
            column = "as_it_is" if self.database.kind == "mysql" else "message_id"
            query = f"SELECT message_id, consumer_group FROM {self._table} WHERE {column} IN ({listed})"
            for name, group in self._rows(query):
                # MySQL compares with a number, or without regard to case, more loosely than an inbox does.
                if (text := _decoded(name).rstrip(" ")) in wanted:
                    found.setdefault(text, set()).add(_decoded(group) if self.names_groups else self._only_group)
        return found

    def _rows(self, query: str) -> Sequence[Any]:
        with self._asked():
            return self.database.rows(self._escaped(query))

    def _escaped(self, query: str) -> str:
        """The query for a driver in Python, which takes `%` for the beginning of a parameter; Spark's takes it as it
        is."""
        return query if self.database.kind == "sqlite" else query.replace("%", "%%")

    def _for_spark(self, table: str) -> str:
        return with_operators(table) if self.database.kind == "postgresql" else table

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            kind = Unavailable if is_gone(getattr(error, "orig", None)) else InvalidRequest
            raise kind(f"--effects on database {self.database.name}: {reason_of(error)}") from None


def business_effects(databases: Sequence[Database], given: Iterable[tuple[str, str]]) -> list[BusinessEffects]:
    """The queries on the databases that they name; `given`: pairs of a name ("": the first database) and a query."""
    found = []
    for name, query in given:
        meant = [d for d in databases if name in (d.name, d.given) or (not name and d.given == databases[0].given)]
        if not meant:
            raise InvalidRequest(f"--effects names database {name!r}, which was not given with --database")
        found += [BusinessEffects(database, query) for database in meant]
    return found


def proven_of(effects: Sequence[BusinessEffects], message_ids: Sequence[str]) -> dict[str, set[str]]:
    """The consumer groups in which each message took effect, as the queries say."""
    groups: dict[str, set[str]] = {}
    for each in effects:
        for name, of_message in each.of(message_ids).items():
            groups.setdefault(name, set()).update(of_message)
    return groups


def with_operators(query: str) -> str:
    """A query of PostgreSQL for its JDBC driver, which takes a `?` that is not doubled for a parameter (pgjdbc#1120):
    it is an operator of jsonb, unless it is within a text, a name or a comment."""
    return _MARKS.sub(lambda found: "??" if found[0] == "?" else found[0], query)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _decoded(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
