"""PostgreSQL's log of one source, as a bridge uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge.errors import Purged, Unfit, refuse
from notify.binlog_bridge.log import LogSnapshot, Retained
from notify.binlog_bridge.postgresql import rights, slot, source
from notify.binlog_bridge.postgresql.position import GAP, Position
from notify.binlog_bridge.postgresql.reader import WalReader
from notify.binlog_bridge.postgresql.slot import Slot
from notify.binlog_bridge.postgresql.source import Published
from notify.binlog_bridge.postgresql.stream import published_anew
from notify.binlog_bridge.scope import Scope
from notify.storage.sql.checkup import Finding


class Wal:
    """See DatabaseLog."""

    takes_tables_first = True
    """A slot has nothing from before it was made."""

    def __init__(self, *, accept_unbounded_wal: bool = False) -> None:
        """`accept_unbounded_wal`: read a source whose disk would fill while this bridge is stopped."""
        self._accept_unbounded_wal = accept_unbounded_wal
        self._slot = Slot("", ())
        self._scope = Scope()
        self._published = Published()
        """The candidate's publications, as they were looked at last."""

    def check(
        self, connection: Connection, name: str, scope: Scope, schemas: Sequence[str] | None, *, fill: bool
    ) -> None:
        self._slot, self._scope = source.slot_of(connection, name, scope), scope
        found = source.findings(connection, self._slot, scope, accept_unbounded_wal=self._accept_unbounded_wal)
        refuse(finding for finding in found if finding.stops)
        if not fill and slot.states(connection, self._slot.name):
            self._published, uncovered = source.published(connection, self._slot, scope)
            refuse(uncovered)

    def findings(self, connection: Connection, name: str, scope: Scope) -> list[Finding]:
        ours = source.slot_of(connection, name, scope)
        found = source.findings(connection, ours, scope, accept_unbounded_wal=self._accept_unbounded_wal)
        if slot.states(connection, ours.name):  # else its bridge has not begun, and will make what is missing
            found += source.published(connection, ours, scope)[1]
        return sorted([*found, *source.slots_without_a_bridge(connection)], key=lambda finding: not finding.stops)

    def watch(self, engine: Engine) -> Retained | None:
        with engine.connect() as connection:
            now, uncovered = source.published(connection, self._slot, self._scope)
            try:
                self._check_unchanged(connection, now, uncovered)
            except Unfit:
                self._published = replace(self._published, has_gap=True)
                raise
            self._published = now
            state = next(iter(slot.states(connection, self._slot.name)), None)
        return Retained(state.retained, state.left, state.age) if state is not None else None

    def _check_unchanged(self, connection: Connection, now: Published, uncovered: list[Finding]) -> None:
        """Raises Unfit if a change since the last look may have kept rows out of the log, or out of the slot."""
        if now.ours != self._published.ours:
            before = set(self._published.ours)
            others = [table for table in now.ours if table not in before]
            found = [finding for finding in source.table_findings(connection, others) if finding.stops]
            if not self._scope.is_many:
                found += now.gone_since(self._published)
            refuse(replace(each, remedy=f"{each.remedy}; then start this bridge with --backfill") for each in found)
        refuse(uncovered)
        if changed := now.changed_since(self._published):
            raise Unfit(published_anew(", ".join(changed[:3])))

    def stopped_at(self, text: str) -> str:
        position = Position.of(text)
        return replace(position, published=GAP).text if position is not None and self._published.has_gap else text

    def denied(self, error: BaseException | None) -> str | None:
        return rights.denied(error.orig if isinstance(error, sa.exc.DBAPIError) else error)

    def check_kind(self, position: Any) -> None:
        if position is not None and not isinstance(position, Position):
            raise Unfit(
                f"the queue's position for this source, {position.shown[:60]}, is of another kind of database: start "
                "with --backfill, which sends the missing messages, and then continues"
            )

    def reader(
        self,
        engine: Engine,
        position: Any,
        *,
        scope: Scope,
        source_us: Callable[[], int],
        known_seconds: float,
        most_bytes: Callable[[], int],
    ) -> WalReader:
        if position is None:
            raise Purged("the queue has no position for this source: start with --backfill")
        if position.published == GAP:
            raise Purged(
                "this bridge stopped because the source did not log all rows (its messages then said why), and had "
                "read on by then: start with --backfill, which sends the missing messages from the tables"
            )
        if put_back := self._published.put_back_since(position.published):
            raise Purged(published_anew(", ".join(put_back[:3])))
        return WalReader(
            engine.url,
            self._slot,
            position,
            scope=scope,
            known_seconds=known_seconds,
            published=lambda: self._published.digest(is_many=scope.is_many),
            most_bytes=most_bytes,
        )

    def prepare_backfill(self, engine: Engine) -> None:
        # A publication that is made after the slot lacks what was written in between: so it is made here only.
        with engine.connect() as connection:
            refuse(source.prepare(connection, self._slot, self._scope))
            self._published, uncovered = source.published(connection, self._slot, self._scope)
            refuse(uncovered)
        slot.make(engine, self._slot.name)

    def snapshot(self, engine: Engine) -> LogSnapshot:
        published = self._published.digest(is_many=self._scope.is_many)
        return slot.snapshot(engine, self._slot.name, published, self._scope.text)
