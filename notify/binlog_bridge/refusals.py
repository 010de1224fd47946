"""Messages that no queue accepts: listed in the source as refused, and sent again when an operator decides so.

The list is a table of the source (notify/movers/refused.py), and the bridge continues after such messages. They are
listed before the position moves past them: a bridge that is killed in between reads them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Engine

from notify.binlog_bridge import source
from notify.binlog_bridge.rows import Logged
from notify.binlog_bridge.scope import OWN, Scope
from notify.client.tables.definitions import half_message, notify_refused
from notify.client.tables.half_rows import row_of
from notify.errors import Unavailable
from notify.movers import refused
from notify.movers.outbox import OUTBOXES, present
from notify.movers.pages import cut, readable
from notify.movers.refused import REPORTED, RETRY, WAITING, Refusal
from notify.protocol.wire import BridgedTransaction, RefusedReport
from notify.runtime.databases import REFUSED, RELAYED, database_now, has_table, within_schema

log = logging.getLogger("notify.binlog_bridge")

RETRIED_AT_ONCE = 100
RETRIED_BYTES = 2 << 20
"""The approximate size of a request with retried transactions; it has at least one transaction."""
Readable = tuple[list[BridgedTransaction], list[Refusal]]
"""Transactions, and refusals of transactions whose rows are not a message."""


class Refusals:
    """The lists of refused messages of one source: each of its schemas has one."""

    def __init__(self, scope: Scope = OWN) -> None:
        self.scope = scope
        """The schemas of the source; a bridge knows them once it has reached it."""

    def note(self, engine: Engine, mover: str, refusals: Sequence[Refusal]) -> None:
        """Add to the list. Raises Unavailable if the source refuses it: the position must not move past them then."""
        ids = [refusal.id for refusal in refusals]
        why = f"no queue takes {ids[0]} ({refusals[0].detail}), and it cannot be noted in the source"
        try:
            _check_writable(engine, why)
            for home, here in self._homes(engine, ids):
                if not refused.ensure(home):
                    raise Unavailable(
                        f"{why}, which has no table notify_refused that this user may not make: "
                        "run `notify doctor --dsn … --create-tables` with a user that may"
                    )
                with home.begin() as connection:
                    for outbox in present(connection):
                        outbox.mark(connection, here, REFUSED)
                    refused.note(connection, mover, [refusal for refusal in refusals if refusal.id in here])
        except sa.exc.SQLAlchemyError as error:
            raise Unavailable(
                f"{why}, whose user needs UPDATE on the tables of messages, and SELECT, INSERT, UPDATE and DELETE on "
                f"notify_refused: {str(error)[:300]}"
            ) from error
        for refusal in refusals:
            log.error("no queue takes %s: %s (%s); it is on the list", refusal.id, refusal.detail, refusal.code)

    def keep(self, engine: Engine, transactions: Sequence[BridgedTransaction]) -> None:
        """Write the rows of refused transactions that stand in the log only, so that they can be tried again. Raises
        Unavailable: the position must not move past them then."""
        for t in transactions:
            if not isinstance(t, Logged):
                continue
            fixed = {
                "transaction_id": t.id, "producer_group": t.producer_group, "mode": "outbox", "state": "COMMITTED",
                "shards": "", "relayed": REFUSED, "created_at": database_now(),
            }  # fmt: skip
            try:
                with within_schema(engine, t.home).begin() as connection:
                    for number, message in enumerate(t.messages):
                        values = fixed | {"message_no": number} | row_of(message)
                        connection.execute(postgresql.insert(half_message).values(values).on_conflict_do_nothing())
            except sa.exc.DataError as error:
                log.error("%s is refused, and no row can have it, so that it cannot be tried again: %s", t.id, error)
            except sa.exc.SQLAlchemyError as error:
                raise Unavailable(
                    f"no queue takes {t.id}, which has no row (rows=False), and none can be written for it: the "
                    f"bridge's user needs INSERT on half_message ({str(error)[:300]})"
                ) from error

    def published(self, engine: Engine, ids: Sequence[str]) -> None:
        """Mark rows that a relay has published. Raises SQLAlchemyError; Unavailable if the source is read-only."""
        if ids:
            _check_writable(engine, "what a relay has published cannot be marked")
        for home, here in self._homes(engine, ids) if ids else ():
            with home.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, here, RELAYED)

    def _homes(self, engine: Engine, ids: Sequence[str]) -> list[tuple[Engine, list[str]]]:
        """The ids by the schema that has their rows; those whose rows are gone belong to the first schema."""
        found: list[tuple[Engine, list[str]]] = []
        left = list(ids)
        for outbox in OUTBOXES:
            homes, left = self.scope.homes(engine, outbox.table, left)
            found += homes
            if not left:
                return found
        engines = self.scope.engines(engine)
        if not engines:
            log.error("no schema of this source has its tables any longer: %s are on no list", ", ".join(left))
            return found
        return [*found, (engines[0][1], left)]

    def retries(self, engine: Engine) -> Iterator[Readable]:
        """The transactions that an operator wants to retry, in pages for a request. Raises SQLAlchemyError."""
        for _, home in self.scope.engines_holding(engine, notify_refused, f"state = '{RETRY}'"):
            yield from self._retries(home)

    def _retries(self, engine: Engine) -> Iterator[Readable]:
        """`retries` of one schema."""
        if not _has_list(engine):
            return
        with engine.begin() as connection:
            if source.is_read_only(connection):
                return
            outboxes = present(connection)
            for outbox in outboxes:
                refused.tidy(connection, outbox)
            ids = refused.to_retry(connection, RETRIED_AT_ONCE)
            if not ids:
                return
            # Nothing is sent without the right to mark it as sent: it would be sent again.
            for outbox in outboxes:
                connection.execute(outbox.table.update().where(sa.false()).values(relayed=RELAYED))
            places = [
                outbox.oldest(connection, RETRIED_AT_ONCE, outbox.table.c.transaction_id.in_(ids))
                for outbox in outboxes
            ]
        for outbox, outbox_places in zip(outboxes, places, strict=True):
            for page in cut(outbox_places, RETRIED_BYTES):
                with engine.connect() as connection:
                    messages = readable(connection, outbox, [place.id for place in page])
                yield messages  # no connection is held while they are sent, nor by a bridge that stops then

    def has_any(self, engine: Engine) -> bool:
        """Whether anything is on a list, decided or not. Raises SQLAlchemyError."""
        for _, home in self.scope.engines_holding(engine, notify_refused, "state <> ''"):
            if _has_list(home):
                with home.connect() as connection:
                    if refused.states(connection):
                        return True
        return False

    def listed(self, engine: Engine, ids: Sequence[str]) -> set[str]:
        """The ids of `ids` that are on a list. Raises SQLAlchemyError."""
        homes, _ = self.scope.homes(engine, notify_refused, ids)
        return {each for home, here in homes for each in self._listed(home, here)}

    def _listed(self, engine: Engine, ids: Sequence[str], state: str | None = None) -> list[str]:
        """The ids that are on the list of one schema, in a state or in any."""
        columns = notify_refused.c
        query = sa.select(columns.transaction_id).where(columns.transaction_id.in_(ids))
        if state is not None:
            query = query.where(columns.state == state)
        with engine.connect() as connection:
            return [str(each) for each in connection.scalars(query)]

    def report(self, engine: Engine) -> RefusedReport | None:
        """The lists as the queue's console shows them; None if the source has none. Raises SQLAlchemyError."""
        whole: RefusedReport | None = RefusedReport(waiting=0) if self.scope.is_many else None
        for _, home in self.scope.engines_holding(engine, notify_refused, f"state = '{WAITING}'"):
            if not _has_list(home):
                continue
            with home.connect() as connection:
                report = refused.report(connection)
            if whole is None:
                return report
            whole.waiting += report.waiting
            whole.transactions = [*whole.transactions, *report.transactions][:REPORTED]
        return whole

    def settle(self, engine: Engine, ids: Sequence[str]) -> None:
        """Mark transactions that the queue has, but that the bridge which sent them did not mark before it died.

        If all are marked, nothing is written: the source may have become a replica. Raises SQLAlchemyError; Unavailable
        if the source accepts no writes.
        """
        if not self.scope.is_many and not _has_list(self.scope.engines(engine)[0][1]):
            return
        homes, _ = self.scope.homes(engine, notify_refused, ids)
        unmarked = [each for home, here in homes for each in self._listed(home, here, RETRY)]
        if unmarked:
            self.taken(engine, unmarked)

    def taken(self, engine: Engine, ids: Sequence[str]) -> None:
        """Mark transactions that the queue has now. Raises SQLAlchemyError; Unavailable if the source is read-only."""
        _check_writable(engine, "messages that were sent again from the list of refused messages cannot be marked")
        homes, _ = self.scope.homes(engine, notify_refused, ids)
        for home, here in homes:
            with home.begin() as connection:
                for outbox in present(connection):
                    outbox.mark(connection, here, RELAYED)
                refused.taken(connection, here)


def _check_writable(engine: Engine, why: str) -> None:
    """Raises Unavailable if the source is a replica."""
    with engine.connect() as connection:
        if source.is_read_only(connection):
            raise Unavailable(f"{why}: the source takes no writes (read_only is ON): is it a replica?")


def _has_list(engine: Engine) -> bool:
    return has_table(engine, notify_refused.name)
