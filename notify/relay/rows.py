"""A relay's access to its database: it reads pages of waiting transactions, and marks them. Called from threads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify import refused
from notify.databases import REFUSED, RELAYED, is_gone
from notify.errors import InvalidRequest, TooLarge
from notify.outbox import LOCAL, OUTBOXES, SERVER, Outbox, Place, present, source_name
from notify.pages import cut, readable
from notify.refused import Refusal
from notify.relay.leases import Leases
from notify.wire import BridgedTransaction, RefusedReport

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
    """The outboxes of one database, limited to the keys that a relay's leases cover."""

    def __init__(self, engine: Engine, leases: Leases, mover: str) -> None:
        """`mover`: the relay's name on the list of refused messages."""
        self._engine = engine
        self._leases = leases
        self._mover = mover
        self._has_list = False
        self._source = ""
        """The database's source id as it was read last; "" if it had none."""
        self.outboxes: list[Outbox] = []

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction that neither waits long for what other sessions have locked, nor outlasts the relay."""
        with self._engine.begin() as connection:
            self._leases.limit(connection)
            yield connection

    def find(self) -> None:
        """Look for outboxes, until both kinds are found: a service or server may make its tables at any time.

        Raises InvalidRequest if the database has no outbox.
        """
        if self._has_list and len(self.outboxes) == len(OUTBOXES):
            return
        outboxes = present(self._engine)
        if self._has_list and outboxes and len(outboxes) == len(self.outboxes):
            return
        if not outboxes:
            raise InvalidRequest(
                f"the database has neither {LOCAL.table.name} nor {SERVER.table.name}: run create_tables in the "
                "service, or `notify storage upgrade`"
            )
        self._has_list = refused.ensure(self._engine)
        if self._has_list:
            self._adopt(outboxes)
        elif not self.outboxes:
            log.warning(
                "the database has no table notify_refused, and this user may not make it: refused messages are in "
                "this log only, and in their table with relayed = 2; run create_tables with a user that may"
            )
        self.outboxes = outboxes

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

    def page(self, outbox: Outbox, after: Place | None = None, left_out: Collection[str] = ()) -> Page:
        """Transactions that wait in an outbox after a place, without those of the topics in `left_out`."""
        with self.begin() as connection:
            condition = self._leases.condition(outbox.table)
            if left_out:
                condition = sa.and_(condition, outbox.beside(sorted(left_out)[:MOST_LEFT_OUT]))
            places = outbox.oldest(connection, PAGE_TRANSACTIONS, condition, after)
            if not places:
                return Page()
            chosen = next(cut(places, PAGE_BYTES))
            ids = [place.id for place in chosen if place.size <= MOST_READ_BYTES]
            is_last = len(chosen) == len(places) < PAGE_TRANSACTIONS
            transactions, unreadable = readable(connection, outbox, ids)
            for place in chosen:
                if place.size > MOST_READ_BYTES:
                    detail = f"its bodies have {place.size:,} bytes: no target takes so many, and they are not read"
                    group_topic_count = outbox.whose(connection, place.id)
                    unreadable.append(
                        Refusal(place.id, *group_topic_count, TooLarge.status, "request_too_large", detail)
                    )
            return Page(transactions, unreadable, chosen[-1], is_last, self._source or self._read_source(connection))

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
        if not self._has_list:
            return RefusedReport(waiting=0)
        with self.begin() as connection:
            for outbox in self.outboxes:
                refused.tidy(connection, outbox)
            return refused.report(connection)


def is_away(error: sa.exc.SQLAlchemyError) -> bool:
    """Whether an error means that the database is away for now."""
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.TimeoutError):
        return True
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    return error.connection_invalidated or is_gone(error.orig)
