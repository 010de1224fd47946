"""LeftBehindRows: sends what producers in mode `auto` have left behind in a bridge's source, from its tables.

The log has these rows, too, but a bridge cannot move them from there: a server may have their half, so that they need
an outcome at the shard that the row names in the end, and a mark, at which all who may send them look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from notify.binlog_bridge.errors import Warnings
from notify.binlog_bridge.kinds import takes_no_writes
from notify.binlog_bridge.scope import Scope
from notify.client.tables.definitions import half_message
from notify.errors import UnsafeTable
from notify.movers.left_behind import LOOK, LOOK_SECONDS, NEEDS, LeftBehindMover
from notify.runtime.databases import has_table, reason_of
from notify.runtime.guarantees import verify_once
from notify.runtime.threads import in_thread


class LeftBehindRows:
    """Sends during one connection to a source."""

    def __init__(self, engine: Engine, scope: Scope, mover: LeftBehindMover) -> None:
        self._engine = engine
        self._scope = scope
        self._mover = mover
        self._warnings = Warnings()

    async def run(self) -> None:
        """Look every LOOK_SECONDS, and send, until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(LOOK_SECONDS)

    async def once(self) -> None:
        """Look, and send what is found. What fails for now is logged, and no reason to stop the bridge."""
        try:
            schemas = await in_thread(self._look)
        except (sa.exc.SQLAlchemyError, RuntimeError, OSError) as error:
            self._mover.complain(LOOK, f"what producers left behind cannot be looked for: {reason_of(error)}")
            return
        if schemas:
            await self._mover.try_to_send(self._engine, schemas)

    async def send(self) -> None:
        """As `once`, but raises the first error; see LeftBehindMover.send."""
        if schemas := await in_thread(self._look):
            await self._mover.send(self._engine, schemas)

    def _look(self) -> list[str]:
        """The schemas with something to send."""
        with self._engine.connect() as connection:
            schemas = self._scope.schemas(connection, [half_message.name])
            if not self._scope.is_many:
                schemas = [each for each in schemas if each and has_table(connection, half_message.name, each)]
            found = self._mover.waiting(connection, self._safe(connection, schemas))
            if found and (why := takes_no_writes(connection)):
                self._mover.complain(LOOK, f"what producers left behind is not sent from here: {why}")
                return []
            return found

    def _safe(self, connection: Connection, schemas: Sequence[str]) -> list[str]:
        """The schemas whose rows this user sees."""
        safe = []
        for schema in schemas:
            try:
                verify_once(connection, NEEDS, schema)
                safe.append(schema)
            except UnsafeTable as error:
                self._warnings.say(f"what producers left behind in schema {schema} is not sent", error)
        return safe
