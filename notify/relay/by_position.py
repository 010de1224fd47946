"""Moves transactions to a target that knows no ids: the position names a published batch, which is then only marked.

Only one relay of a database publishes at a time: the relay that holds all buckets.
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
    """Moves pages of outboxes by position."""

    def __init__(self, sink: Sink, rows: Rows, leases: Leases, total: Relayed) -> None:
        self._sink = sink
        self._rows = rows
        self._leases = leases
        self._total = total
        self._name = ""
        self._epoch = 0

    async def move(self, outbox: Outbox) -> bool:
        """Move a page; False if there was nothing to move.

        Raises Unavailable while another relay holds the leases, or if it published last: then the target is claimed
        again.
        """
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
                table, published = json.loads(position)
                last_outbox = next(each for each in OUTBOXES if each.table.name == table)
                await in_thread(self._rows.note, last_outbox, published, [])
            self._epoch = epoch  # only after the last batch is marked, which would be published again otherwise
            if position:
                return True
        page: Page = await in_thread(self._rows.page, outbox)
        if not page.transactions and not page.unreadable:
            return False
        epoch, self._epoch = self._epoch, 0  # if marking the batch fails, claim again to learn whether it was published
        published, refusals = await self._publish(outbox, page.transactions, epoch)
        await in_thread(self._rows.note, outbox, published, refusals + page.unreadable)
        self._epoch = epoch
        self._total.sent += len(published)
        self._total.refused += len(refusals) + len(page.unreadable)
        return True

    async def _publish(
        self, outbox: Outbox, transactions: list[BridgedTransaction], epoch: int
    ) -> tuple[list[str], list[Refusal]]:
        """Append the transactions that the target accepts; their ids, and refusals of the others."""
        refusals: list[Refusal] = []
        while transactions:
            transaction_ids = [t.id for t in transactions]
            position = json.dumps([outbox.table.name, transaction_ids])
            batch = PackedBridgeBatch(epoch=epoch, expected_position="", position=position, transactions=transactions)
            refused = {item.id: item for item in (await self._sink.append(self._name, batch)).refused}
            if not refused:
                return transaction_ids, refusals
            refusals += [Refusal.of(t, refused[t.id]) for t in transactions if t.id in refused]
            transactions = [t for t in transactions if t.id not in refused]
        return [], refusals
