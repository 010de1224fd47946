"""Sources: the schemas of a database that have Notify's tables, by their source ids, as one producer or check knows
them.

A half names its source, and the schema of this source has its row. A producer that was just started has met no schema
yet, so a look at all schemas finds them. A schema that was copied has the same source id as its original: then the
question is asked in both, and each answers for the rows that it can get.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from notify.check.listener import CheckUnavailable
from notify.check.question import LocalRow, short_lock_waits
from notify.errors import UnsafeTable
from notify.runtime.databases import ALL_ROWS, commits_by_itself, is_held_up, without_server_cursors
from notify.runtime.guarantees import verify_once
from notify.runtime.program_log import program_log
from notify.runtime.schemas import as_text, database_of, found_in, kinds_of, qualified, text_of

log = program_log("notify.check")

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
        self._unread: frozenset[str] = frozenset()
        """The schemas that were locked at the last look, so that their sources may be others by now."""
        self._looked_at: float | None = None
        self._warned: set[str] = set()
        self._unsafe: dict[str, UnsafeTable] = {}
        """The schemas whose checks cannot be answered here, and why: a process of another role may answer them."""
        self._met: dict[tuple[str, str], str] = {}
        """By database and schema, the source id that was last met there: one engine may lead to several databases."""
        self.changes = 0
        """How often a known schema of a database turned out to have another source id."""
        self.on_change: Callable[[], None] | None = None
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

    def note(self, schema: str, source: str, database: str) -> None:
        """Note the source of a schema that a transaction met in a database (`database_of`)."""
        self._count_changes(database, {schema: source})
        if self._by_schema.get(schema) != source:
            self._take({**self._by_schema, schema: source})
            if self.on_change is not None:
                self.on_change()

    def _count_changes(self, database: str, by_schema: dict[str, str]) -> None:
        if len(self._met) > MOST_FORMER + len(self._by_schema):
            self._met = {}
        its_own = {(database, schema): source for schema, source in by_schema.items()}
        if any(self._met.get(key, source) != source for key, source in its_own.items()):
            self.changes += 1
        self._met.update(its_own)

    def _take(self, by_schema: dict[str, str]) -> None:
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

        Schemas that this role may not read or write are left out: none of its transactions has a row there. So are
        views that show the rows of another schema. What was known of a schema that is locked stays.
        """
        with without_server_cursors(connection):
            self._look(connection)

    def _look(self, connection: Connection) -> None:
        began = self._monotonic()
        views: set[str] = set()
        if self.schema:
            wanted = [self.schema]
        else:
            wanted, views = self._there(connection)
            if self._patterns == ALL and not wanted and (found := found_in(connection, "half_message")):
                wanted = [found]  # its error says what is wrong
        database = database_of(connection)
        connection.rollback()
        by_schema: dict[str, str] = {}
        unread: list[str] = []
        for part in _parts(wanted):
            for schema, source in _read(connection, part, _SOURCES, unread, must=len(wanted) == 1):
                by_schema[str(schema)] = text_of(source)
        with_tables = {source for schema, source in by_schema.items() if schema not in views}
        by_schema = {
            schema: source for schema, source in by_schema.items() if schema not in views or source not in with_tables
        }
        self._count_changes(database, by_schema)
        known = self._by_schema
        by_schema |= {schema: known[schema] for schema in unread if schema in known}
        self._unread = frozenset(unread)
        for schema in wanted:
            # Hidden rows are not missing rows, nor are those of a locked table.
            is_left_out = schema in views or schema in unread
            if not is_left_out and (schema in self._unsafe or schema not in by_schema):
                self._verified(connection, schema)
        self._take(by_schema)
        self._looked_at = began

    def _there(self, connection: Connection) -> tuple[list[str], set[str]]:
        """The schemas with both tables, in order; and those in which one of them is a view."""
        sources = kinds_of(connection, "notify_source", self._patterns)
        rows = kinds_of(connection, "half_message", self._patterns)
        kinds = {schema: {kind, sources[schema]} for schema, kind in rows.items() if schema in sources}
        there = [schema for schema, its_kinds in kinds.items() if "foreign" not in its_kinds]
        return there, {schema for schema in there if "view" in kinds[schema]}

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
        from notify.client.tables.definitions import CHECKS  # the SDK imports this module while it is itself imported

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

    def warn_of_rights(self, denied: CheckUnavailable) -> None:
        """Warn, once, that this user lacks the rights to answer checks of transactions that did not commit."""
        if str(denied) not in self._warned:
            self._warned.add(str(denied))
            log.warning(
                "transactions that did not commit stay in doubt until another process answers: %s: grant SELECT and "
                "INSERT on half_message, and SELECT on notify_source, or run `notify check` as a user that has them",
                denied,
            )

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

    def elsewhere(
        self, connection: Connection, transaction_id: str, asked: Sequence[str]
    ) -> tuple[list[LocalRow], list[str]]:
        """A transaction's row in the schemas that were not asked, in transactions of their own; and the schemas
        that are locked, so that a row there is not seen.

        A committed row proves its commit, even if the half names another source: an older SDK, or a source id that was
        replaced meanwhile.
        """
        others = sorted({*self._by_schema, *self._unread}.difference(asked))
        rows: list[LocalRow] = []
        unread: list[str] = []
        for part in _parts(others):
            found = _read(connection, part, _ROWS, unread, {"id": transaction_id})
            rows += [LocalRow.of(*row[1:]) for row in found]
        return rows, unread


def copied(source: str, schemas: Sequence[str]) -> str:
    """The sentence about schemas with the same source id, with its remedy."""
    names = ", ".join(map(repr, schemas))
    return (
        f"the schemas {names} have the same source id {source}, because one is a copy of another: give the copy its "
        "own with `notify doctor --dsn … --schema COPY --new-source`; until then each check is asked in all of them"
    )


_SOURCES = "SELECT {number}, id FROM {source}"
_ROWS = "SELECT {number}, state, shards, relayed FROM {half} WHERE transaction_id = :id AND message_no = 0"


def _parts(schemas: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(schemas), AT_ONCE):
        yield schemas[begin : begin + AT_ONCE]


def _read(
    connection: Connection,
    schemas: Sequence[str],
    query: str,
    unread: list[str],
    parameters: Mapping[str, str] = MappingProxyType({}),
    *,
    must: bool = False,
) -> list[tuple[object, ...]]:
    """The rows of a query in each schema, with the schema as their first value.

    If it fails for several schemas at once, each is asked alone, and those that cannot be read are left out; `unread`
    gets those of them that are locked, for which no other schema waits long. `must`: the error is raised.
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
    # On PostgreSQL the bound is the transaction's, which a driver that commits by itself does not begin.
    begins = connection.dialect.name == "postgresql" and commits_by_itself(connection)
    try:
        if begins:
            connection.exec_driver_sql("BEGIN")
        with short_lock_waits(connection):
            rows = connection.execute(
                sa.text(f"{' UNION ALL '.join(selects)} LIMIT {ALL_ROWS}"), dict(parameters)
            ).all()
        return [(schemas[row[0]], *row[1:]) for row in rows]
    except sa.exc.DBAPIError as error:
        if must or error.connection_invalidated:
            raise
        if len(schemas) == 1:
            log.debug("the schema %s is left out: %s", schemas[0], error)
            if is_held_up(error.orig):
                unread.append(schemas[0])
            return []
    finally:
        if not connection.invalidated:
            if begins:
                connection.exec_driver_sql("ROLLBACK")
            connection.rollback()
    return [row for schema in schemas for row in _read(connection, [schema], query, unread, parameters)]


def _writable(connection: Connection, schema: str, word: str) -> str:
    """The condition that this role may write rows in a schema; none where the database cannot be asked so."""
    if connection.dialect.name != "postgresql":
        return ""
    name = as_text(connection, "half_message", schema)
    return f" {word} pg_catalog.has_any_column_privilege({name}, 'INSERT')"
