"""A relay's access to its database: it reads pages of waiting transactions, and marks them. Called from threads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.client.tables.outbox import Outbox, Place
from notify.errors import InvalidRequest, TooLarge
from notify.movers import refused
from notify.movers.outbox import OUTBOXES, source_name
from notify.movers.pages import cut, readable
from notify.movers.refused import Refusal
from notify.movers.relay.leases import Leases
from notify.movers.returned import is_returned, returned
from notify.protocol.wire import BridgedTransaction, RefusedReport
from notify.runtime.databases import REFUSED, RELAYED, is_gone
from notify.storage.members import Member
from notify.storage.sql import registry

log = logging.getLogger("notify.relay")

PAGE_TRANSACTIONS = 500
PAGE_BYTES = 16 << 20
"""The most bytes of bodies in a page; it has at least one transaction."""
MOST_READ_BYTES = 64 << 20
"""A transaction with more bytes of bodies is refused unread: otherwise a relay might run out of memory at each start.
The targets' own bounds are far below."""
MOST_LEFT_OUT = 1000
"""The most topics that a query leaves out. Transactions of further topics are read, and wait unsent."""


@dataclass(slots=True)
class Page:
    """Waiting transactions, the oldest first; refusals of unreadable ones; and the place of the last transaction."""

    transactions: list[BridgedTransaction] = field(default_factory=list)
    unreadable: list[Refusal] = field(default_factory=list)
    end: Place | None = None
    is_last: bool = True
    source: str = ""
    """The database's source id; "" if it has none."""


class Rows:
    """The outboxes of one schema, limited to the keys that a relay's leases cover."""

    def __init__(self, engine: Engine, leases: Leases, mover: str, schema: str) -> None:
        """`engine`: its tables are those of `schema`. `mover`: the relay's name on the list of refused messages."""
        self._engine = engine
        self._leases = leases
        self._mover = mover
        self.schema = schema
        self._has_list = False
        self._source = ""
        """The schema's source id as it was read last; "" if it had none."""
        self._prepared: list[Outbox] = []
        """The outboxes whose unlisted refused transactions are on the list."""
        self.outboxes: list[Outbox] = []
        self._until: dict[str, Any] = {}
        """By table, the condition for the rows that are moved; a table without one: all that wait."""
        self.waiting = 0
        """How many refused transactions wait for a decision, as the list was read last."""
        self.has_listed = self.is_undecided = True
        """Whether the list may have any transaction, and any that was not dropped."""

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction that neither waits long for what other sessions have locked, nor outlasts the relay."""
        with self._engine.begin() as connection:
            self._leases.limit(connection)
            yield connection

    def has(self, tables: Collection[str]) -> None:
        """Take the names of the outboxes that the schema has."""
        self.outboxes = [outbox for outbox in OUTBOXES if outbox.table.name in tables]
        self._source = ""  # an operator may have given a cloned database another one

    def end_here(self) -> None:
        """Move what waits now, and nothing that is written later. For each outbox the first call decides."""
        unbounded = [outbox for outbox in self.outboxes if outbox.table.name not in self._until]
        if not unbounded:
            return
        with self.begin() as connection:
            for outbox in unbounded:
                self._until[outbox.table.name] = outbox.until(connection, outbox.newest(connection))

    def wanted(self, outbox: Outbox) -> Any:
        """The condition for the rows of an outbox that are to be moved."""
        return sa.and_(outbox.waiting, self._until.get(outbox.table.name, sa.true()))

    @property
    def is_prepared(self) -> bool:
        """Whether there is nothing to do for `find`."""
        return self._has_list and self._prepared == self.outboxes

    def find(self) -> None:
        """Prepare what was found since the last call: the outboxes' list of refused messages."""
        if self.is_prepared:
            return
        self._has_list = refused.ensure(self._engine)
        if self._has_list:
            self._adopt(self.outboxes)
        elif not self._prepared:
            log.warning(
                "%s has no table notify_refused, and this user may not make it: refused messages are in this log only, "
                "and in their table with relayed = 2; run create_tables with a user that may",
                self.schema,
            )
        self._prepared = list(self.outboxes)

    def _adopt(self, outboxes: list[Outbox]) -> None:
        """Put transactions on the list that were refused while there was no list."""
        for outbox in outboxes:
            while True:
                with self.begin() as connection:
                    adopted = refused.adopt(connection, self._mover, outbox)
                if not adopted:
                    break
                log.warning(
                    "%d transactions of %s were refused without a list, and are on it now", adopted, outbox.table.name
                )

    def beat(self, member: Member) -> None:
        """Write a heartbeat to the registry of the server whose table is here."""
        with self.begin() as connection:
            registry.heartbeat(connection, member)

    def source(self) -> str:
        """The database's source id, read again; "" if it has none."""
        with self.begin() as connection:
            return self._read_source(connection)

    def _read_source(self, connection: Connection) -> str:
        try:
            self._source = source_name(connection)
        except InvalidRequest:
            self._source = ""
        return self._source

    def page(
        self,
        outbox: Outbox,
        after: Place | None = None,
        left_out: Collection[str] = (),
        sent_until: datetime | None = None,
        most_bytes: int = PAGE_BYTES,
    ) -> Page:
        """Transactions that wait in an outbox after a place, without those of the topics in `left_out`.

        `sent_until`: for a target that knows no ids, the time of the newest transaction that it got. Transactions that
        it may have got already are among the unreadable ones: see notify/movers/returned.py.
        """
        with self.begin() as connection:
            condition = sa.and_(self._leases.condition(outbox.table), self._until.get(outbox.table.name, sa.true()))
            if left_out:
                condition = sa.and_(condition, outbox.has_other_topic(sorted(left_out)[:MOST_LEFT_OUT]))
            places = outbox.oldest(connection, PAGE_TRANSACTIONS, condition, after)
            if not places:
                return Page()
            chosen = next(cut(places, most_bytes))
            returned = self._returned(connection, outbox, chosen, sent_until)
            ids = [place.id for place in chosen if place.size <= MOST_READ_BYTES and place.id not in returned]
            is_last = len(chosen) == len(places) < PAGE_TRANSACTIONS
            transactions, unreadable = readable(connection, outbox, ids)
            unreadable += returned.values()
            for place in chosen:
                if place.size > MOST_READ_BYTES and place.id not in returned:
                    detail = f"its bodies have {place.size:,} bytes: no target accepts that many, so they are not read"
                    group_topic_count = outbox.whose(connection, place.id)
                    unreadable.append(
                        Refusal(place.id, *group_topic_count, TooLarge.status, "request_too_large", detail)
                    )
            return Page(transactions, unreadable, chosen[-1], is_last, self._source or self._read_source(connection))

    def _returned(
        self, connection: Connection, outbox: Outbox, places: Sequence[Place], sent_until: datetime | None
    ) -> dict[str, Refusal]:
        """Refusals of transactions that may have come back with a dump, except of those that an operator released."""
        suspects = [place.id for place in places if is_returned(place.id, place.at, sent_until)]
        if not suspects:
            return {}
        released = refused.released(connection, suspects) if self._has_list else set()
        return {
            suspect: returned(suspect, *outbox.whose(connection, suspect), knows_ids=sent_until is None)
            for suspect in suspects
            if suspect not in released
        }

    def note(self, outbox: Outbox, sent: Sequence[str], refusals: Sequence[Refusal]) -> None:
        """In one transaction, mark the ids that the target has, and list the refused transactions."""
        for refusal in refusals:
            log.error("%s is refused: %s (%s)", refusal.id, refusal.detail, refusal.code)
        with self.begin() as connection:
            outbox.mark(connection, sent, RELAYED)
            outbox.mark(connection, [refusal.id for refusal in refusals], REFUSED)
            if self._has_list:
                refused.note(connection, self._mover, refusals)

    def listed(self) -> RefusedReport:
        """The refused transactions that wait for a decision; removes those from the list that were sent since."""
        self.find()
        report = RefusedReport(waiting=0)
        states: set[str] = set()
        if self._has_list:
            with self.begin() as connection:
                states = refused.states(connection)
                if states:
                    for outbox in self.outboxes:
                        refused.tidy(connection, outbox)
                    report = refused.report(connection)
        self.has_listed = bool(states) or not self._has_list
        self.is_undecided = self.has_listed and states != {refused.DROPPED_STATE}
        self.waiting = report.waiting
        return report


def is_away(error: sa.exc.SQLAlchemyError) -> bool:
    """Whether an error means that the database is unreachable for now."""
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.TimeoutError):
        return True
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    return error.connection_invalidated or is_gone(error.orig)
