"""Reports on a running bridge: its progress in the source's registry, and its refused messages to the target.

Neither report delays the messages."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from notify.binlog_bridge import source
from notify.binlog_bridge.errors import Warnings
from notify.binlog_bridge.log import DatabaseLog
from notify.binlog_bridge.refusals import Refusals
from notify.binlog_bridge.scope import OWN, Scope
from notify.binlog_bridge.totals import Totals
from notify.movers.sinks.showing import Showing
from notify.runtime.databases import has_table
from notify.runtime.threads import in_thread
from notify.storage.members import Member
from notify.storage.sql import registry
from notify.storage.sql.tables import server_member

ANNOUNCE_SECONDS = 2.0


class Announcing:
    """Reports on one bridge, during one connection to its source."""

    def __init__(
        self,
        engine: Engine,
        log_of_source: DatabaseLog,
        source: str,
        totals: Totals,
        refusals: Refusals,
        showing: Showing,
    ) -> None:
        """`source`: the source's name; `totals`: the bridge's progress."""
        self._engine = engine
        self._log = log_of_source
        self._source = source
        self._totals = totals
        self._refusals = refusals
        self._showing = showing
        self._warnings = Warnings()

    async def run(self) -> None:
        """Report until cancelled. A report that the source or the target refuses is logged and tried again.

        Raises Unfit if rows would be missed from now on.
        """
        while True:
            await asyncio.sleep(ANNOUNCE_SECONDS)
            try:
                await in_thread(self._watch)
            except (sa.exc.SQLAlchemyError, OSError) as error:
                self._warnings.say("the source cannot be looked at", error)
            try:
                await in_thread(announce, self._engine, mover_of(self._source), self._totals, self._refusals.scope)
            except (sa.exc.SQLAlchemyError, OSError) as error:
                self._warnings.say(
                    "this bridge cannot write its progress to the source's registry, and no row is purged until then "
                    "(its user needs SELECT, INSERT and UPDATE on server_member)",
                    error,
                )
            try:
                report = await in_thread(self._refusals.report, self._engine)
            except (sa.exc.SQLAlchemyError, OSError) as error:
                self._warnings.say(
                    "the list of refused messages cannot be read (the bridge's user needs SELECT on notify_refused)",
                    error,
                )
                continue
            if report is not None:
                await self._showing.show(self._source, report)

    def _watch(self) -> None:
        """See DatabaseLog."""
        self._totals.retained = retained = self._log.watch(self._engine)
        if retained is not None and retained.left is not None and retained.kept > retained.left:
            size, left = retained.kept >> 20, retained.left >> 20
            self._warnings.say(
                "the source keeps more than half of what it may keep of its log for this bridge, and gives the bridge "
                "up when all is used (max_slot_wal_keep_size): find out why the bridge is behind",
                f"{size:,} MB are kept, {left:,} MB are left",
            )


def mover_of(source: str) -> str:
    """The name of a source's bridge in the registry and on the list of refused messages."""
    return f"bridge-{source}"


def announce(engine: Engine, mover: str, totals: Totals, scope: Scope = OWN) -> None:
    """Write a bridge's progress to the source's registries, if there are any: retention waits for the bridge.

    Nothing is written to a replica, which has no registry of its own.
    """
    for _, home in scope.engines(engine, [server_member.name]):
        with home.begin() as connection:
            if source.is_read_only(connection) or not has_table(connection, server_member.name):
                return
            detail = {"read_through_us": totals.read_through_us, "lag": round(totals.lag_us / 1e6, 3)}
            registry.heartbeat(connection, Member(mover, "bridge", detail=detail))
