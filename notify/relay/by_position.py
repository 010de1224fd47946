"""Moving to a target that knows no ids: the position names the batch, so that one that was published is only marked.

One relay of a database publishes at a time, the one that holds all buckets.
"""

from __future__ import annotations

import json

from notify.errors import Conflict, Unavailable
from notify.outbox import OUTBOXES, Outbox
from notify.refused import Refusal
from notify.relay.leases import Leases
from notify.relay.mover import Relayed
from notify.relay.rows import Page, Rows
from notify.sinks.sink import Sink
from notify.threads import in_thread
from notify.wire import BridgedTransaction, PackedBridgeBatch


class ByPosition:
    """Moves pages of outboxes."""

    def __init__(self, sink: Sink, rows: Rows, leases: Leases, total: Relayed) -> None:
        self._sink = sink
        self._rows = rows
        self._leases = leases
        self._total = total
        self._name = ""
        self._epoch = 0

    async def move(self, outbox: Outbox) -> bool:
        """Move a page; False if there was nothing. Whoever holds the leases publishes: a target that hears of another
        relay is asked again, Unavailable meanwhile."""
        try:
            return await self._move(outbox)
        except Conflict as error:
            raise Unavailable(f"another relay of this database published last: {error}") from error

    async def _move(self, outbox: Outbox) -> bool:
        if not self._epoch:
            if not self._leases.all():
                raise Unavailable("another relay of this database publishes; one does at a time")
            self._name = self._name or "relay-" + await in_thread(self._rows.source)
            epoch, position = await self._sink.claim(self._name)
            if position:
                table, names = json.loads(position)
                last = next(o for o in OUTBOXES if o.table.name == table)
                await in_thread(self._rows.note, last, names, [])
            self._epoch = epoch  # not before the last batch is marked: it would be published again
            if position:
                return True
        page: Page = await in_thread(self._rows.page, outbox)
        if not page.transactions and not page.unreadable:
            return False
        epoch, self._epoch = self._epoch, 0  # until the batch is marked: else claim again, and see what became of it
        names, refusals = await self._publish(outbox, page.transactions, epoch)
        await in_thread(self._rows.note, outbox, names, refusals + page.unreadable)
        self._epoch = epoch
        self._total.sent += len(names)
        self._total.refused += len(refusals) + len(page.unreadable)
        return True

    async def _publish(
        self, outbox: Outbox, transactions: list[BridgedTransaction], epoch: int
    ) -> tuple[list[str], list[Refusal]]:
        """Append what the target takes; its ids, and what the target refuses for good."""
        refusals: list[Refusal] = []
        while transactions:
            names = [t.id for t in transactions]
            position = json.dumps([outbox.table.name, names])
            batch = PackedBridgeBatch(epoch=epoch, expected_position="", position=position, transactions=transactions)
            refused = {item.id: item for item in (await self._sink.append(self._name, batch)).refused}
            if not refused:
                return names, refusals
            refusals += [Refusal.of(t, refused[t.id]) for t in transactions if t.id in refused]
            transactions = [t for t in transactions if t.id not in refused]
        return [], refusals
