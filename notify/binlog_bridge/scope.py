"""The scope of a bridge: the schemas (databases, as MySQL says) whose tables it reads from one log.

Patterns also cover schemas that are made later: the log names the schema of each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.movers.outbox import OUTBOXES
from notify.runtime.databases import within_schema
from notify.runtime.schemas import check_choice, found_in, holding, kinds_of, matches

_WILD = re.compile(r"[*?\[]")
_WORD = re.compile(rb"[^\s`'\".,;()=]+")


@dataclass(frozen=True, slots=True)
class Scope:
    """One schema, by its name in the log, or those that match patterns."""

    schema: str = ""
    patterns: str = ""

    @classmethod
    def of(cls, connection: Connection, schema: str | None, schemas: str | None) -> Scope:
        """The scope that a user named, as the server spells names; without a name, the connection's database.

        Raises InvalidRequest for both names, or for no pattern at all.
        """
        check_choice(schema, schemas)
        if connection.dialect.name == "postgresql":
            return cls(patterns=schemas) if schemas else cls(schema or _found_schema(connection))
        if not schema and not schemas:
            return cls(str(connection.exec_driver_sql("SELECT DATABASE()").scalar() or ""))
        folds = connection.exec_driver_sql("SELECT @@lower_case_table_names").scalar()
        schema, schemas = schema or "", schemas or ""
        return cls(schema.lower(), schemas.lower()) if folds else cls(schema, schemas)

    @property
    def is_many(self) -> bool:
        """Whether there may be several schemas."""
        return bool(self.patterns)

    def has(self, schema: str) -> bool:
        """Whether the bridge serves a schema."""
        if not self.patterns:
            return schema == self.schema
        return matches(schema, self.patterns)

    @property
    def text(self) -> str:
        """The schema's name or the patterns, as a position has them."""
        return self.patterns or self.schema

    def is_within(self, text: str) -> bool:
        """Whether every schema of this scope is one of those of the scope with this text."""
        ours = self.patterns.split(",") if self.patterns else [self.schema]
        theirs = [pattern.strip() for pattern in text.split(",")]
        return self.text == text or all(
            pattern.strip() in theirs or (not _WILD.search(pattern) and matches(pattern.strip(), text))
            for pattern in ours
        )

    def is_named_in(self, database: bytes, text: bytes) -> bool:
        """Whether a statement of a session in `database` may concern one of the schemas; upper and lower case are the
        same, because the source may fold names, but logs the statement unchanged."""
        if not self.patterns:
            ours = self.schema.lower().encode()
            return database.lower() == ours or ours in text.lower()
        folded = Scope(patterns=self.patterns.lower())
        words = [database.lower(), *_WORD.findall(text.lower())]
        return any(folded.has(word.decode("utf-8", "replace")) for word in words)

    def schemas(self, connection: Connection, tables: Iterable[str] = ()) -> list[str]:
        """The schemas that there are now, in the order of their names: those with one of these tables, by default with
        an outbox. The only schema counts as there. Views do not: the log has the rows of tables."""
        if not self.patterns:
            return [self.schema]
        names = list(tables) or [outbox.table.name for outbox in OUTBOXES]
        found = [kinds_of(connection, name, self.patterns) for name in names]
        return sorted({schema for kinds in found for schema, kind in kinds.items() if kind == "table"})

    def engines(self, engine: Engine, tables: Iterable[str] = ()) -> list[tuple[str, Engine]]:
        """Each of `schemas`, and an engine whose tables are in it."""
        if not self.patterns:
            return [(self.schema, within_schema(engine, self.schema))]
        with engine.connect() as connection:
            return [(schema, within_schema(engine, schema)) for schema in self.schemas(connection, tables)]

    def engines_holding(self, engine: Engine, table: sa.Table, condition: str) -> list[tuple[str, Engine]]:
        """Those of `engines` whose table has a row that meets a condition, which is an SQL text; the only schema if it
        has the table or not."""
        if not self.patterns:
            return self.engines(engine)
        with engine.connect() as connection:
            conditions = {schema: {table.name: condition} for schema in self.schemas(connection, [table.name])}
            found = holding(connection, conditions) if conditions else []
        return [(schema, within_schema(engine, schema)) for schema in found]

    def homes(
        self, engine: Engine, table: sa.Table, ids: Sequence[str]
    ) -> tuple[list[tuple[Engine, list[str]]], list[str]]:
        """The ids by the schema whose table has these transactions, and those that no schema's table has. The only
        schema has them all, without asking."""
        if not self.patterns:
            return [(self.engines(engine)[0][1], list(ids))], []
        left = list(ids)
        found: list[tuple[Engine, list[str]]] = []
        for _, within in self.engines(engine, [table.name]):
            if not left:
                break
            with within.connect() as connection:
                query = sa.select(table.c.transaction_id).where(table.c.transaction_id.in_(left)).distinct()
                here = {str(each) for each in connection.scalars(query)}
            if here:
                found.append((within, [each for each in left if each in here]))
                left = [each for each in left if each not in here]
        return found, left


def _found_schema(connection: Connection) -> str:
    """The schema in which a connection to PostgreSQL finds an outbox, or would make one."""
    for outbox in OUTBOXES:
        if schema := found_in(connection, outbox.table.name):
            return schema
    return str(connection.exec_driver_sql("SELECT current_schema()").scalar() or "")


OWN = Scope()
"""The scope of a connection whose tables are in its own database."""
