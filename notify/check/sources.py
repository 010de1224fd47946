"""Sources: the schemas of a database that have Notify's tables, by their source ids, as one producer or check knows
them.

A half names its source, and the schema of this source has its row. A producer that was just started has met no schema
yet, so a look at all schemas finds them. A schema that was copied has the same source id as its original: then the
question is asked in both, and each answers for the rows that it can get.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.check.listener import CheckUnavailable
from notify.errors import UnsafeTable
from notify.guarantees import verify_once
from notify.schemas import found_in, qualified, with_table

log = logging.getLogger("notify.check")

AT_ONCE = 200
"""The most schemas that one transaction reads: PostgreSQL keeps a lock for each table until its end."""
FRESH_SECONDS = 1.0
"""How old a look may be before a check is answered by it: a copy of a schema may have been made since."""
MOST_FORMER = 10_000
"""The most source ids that are remembered after their schema got another one."""
ALL = "*"


class Sources:
    """The sources that one producer, or one check, knows. Any thread may use it."""

    def __init__(
        self, schema: str | None = None, patterns: str = ALL, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`schema`: the only schema; None: those that `patterns` name (`t_*,public`), by default all."""
        self.schema = schema
        self._monotonic = monotonic
        self._patterns = patterns
        self._by_schema: dict[str, str] = {}
        """The source id of each schema; replaced as a whole, so that any thread may read it."""
        self._former: dict[str, tuple[str, ...]] = {}
        """For source ids that no schema has any more, the schemas that had them."""
        self._looked_at: float | None = None
        self._warned: set[str] = set()
        self._unsafe: dict[str, UnsafeTable] = {}
        """The schemas whose checks cannot be answered here, and why: a process of another role may answer them."""
        self.changes = 0
        """How often a known schema turned out to have another source id."""
        self.told: Callable[[], None] | None = None
        """Called, in any thread, when a source becomes known outside of a look."""

    # --- what is known ----------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        """The source ids that can be answered for, also former ones, sorted."""
        return sorted({*(s for schema, s in self._by_schema.items() if schema not in self._unsafe), *self._former})

    @property
    def schemas(self) -> list[str]:
        """The schemas, sorted."""
        return sorted(self._by_schema)

    def schemas_of(self, source: str) -> list[str]:
        """The schemas with this source id, sorted: several if a schema was copied."""
        return sorted(schema for schema, its_source in self._by_schema.items() if its_source == source)

    def seconds_since_look(self) -> float:
        """Seconds since the last look began; infinite before the first one."""
        return float("inf") if self._looked_at is None else self._monotonic() - self._looked_at

    def note(self, schema: str, source: str) -> None:
        """Note the source of a schema that a transaction met."""
        if self._by_schema.get(schema) != source:
            self._take({**self._by_schema, schema: source})
            if self.told is not None:
                self.told()

    def _take(self, by_schema: dict[str, str]) -> None:
        before = self._by_schema
        if any(before.get(schema, source) != source for schema, source in by_schema.items()):
            self.changes += 1
        present = set(by_schema.values())
        former = {source: schemas for source, schemas in self._former.items() if source not in present}
        for schema, source in self._by_schema.items():
            if source not in present:
                former[source] = tuple(sorted({*former.get(source, ()), schema}))
        for source in list(former)[: max(0, len(former) - MOST_FORMER)]:
            del former[source]
        self._by_schema, self._former = by_schema, former
        self._warn_of_copies()

    def _warn_of_copies(self) -> None:
        by_source: dict[str, list[str]] = {}
        for schema, source in sorted(self._by_schema.items()):
            by_source.setdefault(source, []).append(schema)
        for source, schemas in by_source.items():
            if len(schemas) > 1 and source not in self._warned:
                self._warned.add(source)
                log.warning("%s", copied(source, schemas))

    # --- looking ----------------------------------------------------------------------------------------------

    def look(self, connection: Connection) -> None:
        """Read the sources of all schemas, in transactions of their own. Raises SQLAlchemy's errors.

        Schemas that this role may not read or write are left out: none of its transactions has a row there.
        """
        began = self._monotonic()
        if self.schema:
            wanted = [self.schema]
        else:
            with_source = set(with_table(connection, "notify_source", self._patterns))
            wanted = [name for name in with_table(connection, "half_message", self._patterns) if name in with_source]
            if self._patterns == ALL and not wanted and (found := found_in(connection, "half_message")):
                wanted = [found]  # its error says what is wrong
        connection.rollback()
        by_schema: dict[str, str] = {}
        for part in _parts(wanted):
            for schema, source in _read(connection, part, _SOURCES, must=len(wanted) == 1):
                by_schema[str(schema)] = str(source)
        for schema in wanted:
            if schema in self._unsafe or schema not in by_schema:  # hidden rows are not missing rows
                self._verified(connection, schema)
        self._take(by_schema)
        self._looked_at = began

    def verify(self, connection: Connection, schema: str) -> None:
        """Raises CheckUnavailable if answers from this schema would be wrong. Its source is not polled for then."""
        if not self._verified(connection, schema):
            raise CheckUnavailable(str(self._unsafe[schema]))

    def verify_all(self, connection: Connection) -> None:
        """Verify each schema of the last look. Raises UnsafeTable if none of them can be answered for."""
        safe = [schema for schema in self.schemas if self._verified(connection, schema)]
        if self._unsafe and not safe:
            raise next(iter(self._unsafe.values()))

    def _verified(self, connection: Connection, schema: str) -> bool:
        from notify.client.table import CHECKS  # the SDK imports this module while it is itself imported

        try:
            verify_once(connection, CHECKS, schema)
            self._unsafe.pop(schema, None)
            return True
        except UnsafeTable as error:
            if str(self._unsafe.get(schema)) != str(error):
                log.warning("checks of the schema %s are not answered here: %s", schema, error)
            self._unsafe[schema] = error
            return False
        finally:
            if not connection.invalidated:
                connection.rollback()

    def freshen(self, connection: Connection) -> None:
        """Look, if the last look is older than FRESH_SECONDS."""
        if self.seconds_since_look() > FRESH_SECONDS:
            self.look(connection)

    def unknown(self, source: str) -> str:
        """Why a half of this source cannot be answered here."""
        known = self._by_schema
        if self._unsafe:
            here = str(next(iter(self._unsafe.values())))
        elif len(known) == 1:
            (schema, its_source), *_ = known.items()
            here = f"this database is source {its_source}" + ("" if schema in ("main", "public") else f" ({schema})")
        elif known:
            here = f"none of this database's {len(known)} sources is the half's"
        else:
            here = "no schema here has a source id: run create_tables on this database"
        return f"{here}, but the half came from source {source or '(none)'}"

    def elsewhere(self, connection: Connection, transaction_id: str, asked: Sequence[str]) -> list[tuple[str, str]]:
        """State and shards of a transaction's row in the schemas that were not asked, in transactions of their own.

        A committed row proves its commit, even if the half names another source: an older SDK, or a source id that was
        replaced meanwhile.
        """
        others = [schema for schema in self.schemas if schema not in asked]
        rows = []
        for part in _parts(others):
            rows += [(str(row[1]), str(row[2])) for row in _read(connection, part, _ROWS, {"id": transaction_id})]
        return rows


def copied(source: str, schemas: Sequence[str]) -> str:
    """The sentence about schemas with the same source id, with its remedy."""
    names = ", ".join(map(repr, schemas))
    return (
        f"the schemas {names} have the same source id {source}, because one is a copy of another: give the copy its "
        "own with `notify doctor --dsn … --schema COPY --new-source`; until then each check is asked in all of them"
    )


_SOURCES = "SELECT {number}, id FROM {source}"
_ROWS = "SELECT {number}, state, shards FROM {half} WHERE transaction_id = :id AND message_no = 0"


def _parts(schemas: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(schemas), AT_ONCE):
        yield schemas[begin : begin + AT_ONCE]


def _read(
    connection: Connection,
    schemas: Sequence[str],
    query: str,
    parameters: Mapping[str, str] = MappingProxyType({}),
    *,
    must: bool = False,
) -> list[tuple[object, ...]]:
    """The rows of a query in each schema, with the schema as their first value.

    If it fails for several schemas at once, each is asked alone, and those that cannot be read are left out; `must`:
    the error is raised.
    """
    selects = [
        query.format(
            number=number,
            source=qualified(connection, "notify_source", schema),
            half=qualified(connection, "half_message", schema),
        )
        + _writable(connection, schema, "WHERE" if "WHERE" not in query else "AND")
        for number, schema in enumerate(schemas)
    ]
    try:
        rows = connection.execute(sa.text(" UNION ALL ".join(selects)), dict(parameters)).all()
        return [(schemas[row[0]], *row[1:]) for row in rows]
    except sa.exc.DBAPIError as error:
        if must or error.connection_invalidated:
            raise
        if len(schemas) == 1:
            log.debug("the schema %s is left out: %s", schemas[0], error)
            return []
    finally:
        if not connection.invalidated:
            connection.rollback()
    return [row for schema in schemas for row in _read(connection, [schema], query, parameters)]


def _writable(connection: Connection, schema: str, word: str) -> str:
    """The condition that this role may write rows in a schema; none where the database cannot be asked so."""
    if connection.dialect.name != "postgresql":
        return ""
    name = qualified(connection, "half_message", schema).replace("'", "''")
    return f" {word} pg_catalog.has_table_privilege('{name}', 'INSERT')"
