"""Sources: the schemas of one database that a relay serves, and which of them have waiting rows."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.errors import InvalidRequest, UnsafeTable
from notify.movers.outbox import LOCAL, MOVES, OUTBOXES, SERVER
from notify.movers.relay.leases import Leases
from notify.movers.relay.rows import Rows
from notify.protocol.wire import RefusedReport
from notify.runtime.databases import has_table, is_lost, reason_of, within_schema
from notify.runtime.guarantees import verify, verify_once
from notify.runtime.schemas import check_choice, found_in, holding, with_table

log = logging.getLogger("notify.relay")

REPORTS_AT_ONCE = 20
"""The most lists of refused messages that are read at a look."""
_WAKES = sa.text(
    "SELECT n.nspname, EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid "
    "AND t.tgname = 'half_message_wake' AND t.tgenabled IN ('O', 'A')), "
    "EXISTS (SELECT FROM pg_catalog.pg_locks l WHERE l.locktype = 'relation' AND l.relation = c.oid AND l.granted "
    "AND l.mode = 'RowExclusiveLock' AND l.pid <> pg_catalog.pg_backend_pid() "
    "AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())) "
    "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    f"WHERE c.relname = '{LOCAL.table.name}' AND n.nspname = ANY(:schemas)"
)
"""Whether a schema's outbox wakes relays, and whether a transaction is open that has inserted rows."""


class Seen(NamedTuple):
    """The result of a look.

    `waiting`: the schemas with waiting rows; `polled`: those whose commits do not wake this relay; `open`: those with
    an open transaction that may have inserted rows, which wakes no relay if another transaction did so at the same
    time.
    """

    waiting: list[str]
    polled: set[str]
    open: set[str]


class Sources:
    """The schemas that one relay serves."""

    def __init__(
        self, engine: Engine, leases: Leases, mover: str, *, schema: str | None = None, schemas: str | None = None
    ) -> None:
        """`schema`: the only one; `schemas`: patterns, separated by commas; without both, those in which the connection
        finds the tables. `mover`: the relay's name on the lists of refused messages.

        Raises InvalidRequest for both, or for no pattern at all.
        """
        check_choice(schema, schemas)
        self._engine = engine
        self._leases = leases
        self._mover = mover
        self._schema = schema
        self._patterns = schemas
        self._changed: list[str] = []
        """The schemas whose list of refused messages this relay has changed, or has not read yet."""
        self._undecided: deque[str] = deque()
        """The schemas whose list has transactions about which an operator may decide."""
        self._folds: bool | None = None
        """Whether the server compares names of schemas without case; None: not asked yet."""
        self.by_schema: dict[str, Rows] = {}
        self.unsafe: dict[str, str] = {}
        """The schemas that are left alone since their tables cannot keep what is promised, and why."""

    @property
    def are_many(self) -> bool:
        """Whether the schemas are named by patterns, so that they come and go."""
        return self._patterns is not None

    def find(self) -> None:
        """Look for schemas with tables, and for their tables: services and servers may make them at any time.

        Raises InvalidRequest if there are none, and UnsafeTable, unless the schemas are named by patterns.
        """
        found = self._leases.read(self._tables)
        if self.are_many:
            self._leave_out(found)
        for schema in found if not self.are_many else ():  # each time: an empty outbox may have become a hidden one
            self._leases.read(partial(verify, needs=MOVES, schema=self._named(schema)))
        for schema in self.by_schema.keys() - found.keys():
            log.warning("schema %s no longer has an outbox: it is forgotten", schema)
            del self.by_schema[schema]
        for schema, names in found.items():
            rows = self.by_schema.get(schema)
            if rows is None:
                engine = within_schema(self._engine, self._named(schema))
                rows = self.by_schema[schema] = Rows(engine, self._leases, self._mover, schema)
                self._changed.append(schema)
            rows.has(names)
        if found or self.are_many:
            return
        where = f"schema {self._schema}" if self._schema else "the database"
        raise InvalidRequest(
            f"{where} has neither {LOCAL.table.name} nor {SERVER.table.name}: run create_tables in the service, or "
            "`notify storage upgrade`"
        )

    def _named(self, schema: str) -> str | None:
        """SQLite's only schema needs no name, and its list of attached files is the connection's."""
        return None if self._engine.dialect.name == "sqlite" else schema

    def _leave_out(self, found: dict[str, set[str]]) -> None:
        """Leave out the schemas whose tables cannot keep what is promised; the others do not wait for them."""
        unsafe: dict[str, str] = {}
        for schema in found:
            try:
                self._leases.read(partial(verify_once, needs=MOVES, schema=self._named(schema)))
            except (UnsafeTable, sa.exc.DBAPIError) as error:
                if is_lost(error):
                    raise
                unsafe[schema] = why = reason_of(error)
                if self.unsafe.get(schema) != why:
                    log.warning("schema %s is left alone: %s", schema, why)
        for schema in unsafe:
            del found[schema]
        self.unsafe = unsafe

    def _tables(self, connection: Connection) -> dict[str, set[str]]:
        """The names of the outboxes in each schema."""
        found: dict[str, set[str]] = {}
        for outbox in OUTBOXES:
            name = outbox.table.name
            if self._patterns is not None:
                schemas = with_table(connection, name, self._spelled(connection, self._patterns))
            else:
                schema = found_in(connection, name, self._spelled(connection, self._schema or ""))
                schemas = [schema] if schema and self._has(connection, name, schema) else []
            for schema in schemas:
                found.setdefault(self._spelled(connection, schema), set()).add(name)
        return found

    def _spelled(self, connection: Connection, names: str) -> str:
        """Names as all relays spell them: a lock's name has the schema's, which some servers compare without case."""
        if self._folds is None:
            is_mysql = connection.dialect.name in ("mysql", "mariadb")
            self._folds = is_mysql and bool(connection.exec_driver_sql("SELECT @@lower_case_table_names").scalar())
        return names.lower() if self._folds else names

    def _has(self, connection: Connection, table: str, schema: str) -> bool:
        return has_table(connection, table, self._named(schema))

    def look(self, schemas: Collection[str]) -> Seen:
        """Look for waiting rows in these schemas."""
        there = [schema for schema in schemas if schema in self.by_schema]
        if not there:
            return Seen([], set(), set())
        return self._leases.read(lambda connection: self._look(connection, there))

    def _look(self, connection: Connection, schemas: list[str]) -> Seen:
        listening = [schema for schema in schemas if self._listens(schema)]
        woken: set[str] = set()
        unsettled: set[str] = set()
        if listening:  # before the rows are looked for: a transaction that ends in between has left its rows
            for schema, wakes, has_open in connection.execute(_WAKES, {"schemas": listening}):
                if wakes:
                    woken.add(str(schema))
                if has_open:
                    unsettled.add(str(schema))
        conditions = {
            schema: {
                o.table.name: _written(self.by_schema[schema].wanted(o), connection.dialect)
                for o in self.by_schema[schema].outboxes
            }
            for schema in schemas
        }
        return Seen(holding(connection, conditions), set(schemas) - woken, unsettled & woken)

    def _listens(self, schema: str) -> bool:
        """Whether commits may wake this relay. A server's table wakes it only now and then."""
        return self._engine.dialect.name == "postgresql" and SERVER not in self.by_schema[schema].outboxes

    def reports(self, changed_only: bool = False) -> list[tuple[str, RefusedReport]]:
        """The source ids and reports of lists of refused messages that have changed, or (not with `changed_only`) that
        an operator may have changed, REPORTS_AT_ONCE at most. Sources without an id are left out.
        """
        chosen = self._changed[:REPORTS_AT_ONCE]
        del self._changed[: len(chosen)]
        if not changed_only:
            for _ in range(min(len(self._undecided), REPORTS_AT_ONCE - len(chosen))):
                chosen.append(self._undecided.popleft())
        reports = []
        for schema in dict.fromkeys(chosen):
            rows = self.by_schema.get(schema)
            if rows is None:
                continue
            try:
                report = rows.listed()
                source = rows.source() if report.waiting or rows.has_listed else ""
            except sa.exc.DBAPIError as error:
                self._undecided.append(schema)
                if not self.are_many or is_lost(error):
                    raise
                log.warning("schema %s: its list of refused messages cannot be read: %s", schema, reason_of(error))
                continue
            if rows.is_undecided and schema not in self._undecided:
                self._undecided.append(schema)
            if source:
                reports.append((source, report))
        return reports

    def has_changed(self, schema: str) -> None:
        """Record that the list of refused messages of a schema may have changed."""
        if schema not in self._changed:
            self._changed.append(schema)


def _written(condition: Any, dialect: sa.Dialect) -> str:
    """A condition as a text."""
    return str(condition.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
