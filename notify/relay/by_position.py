"""Moving to a target that knows no ids: the position names the batch, so that one that was published is only marked.

One relay of a database publishes at a time, the one that holds all buckets.
"""

from __future__ import annotations

import json

from notify.errors import Unavailable
from notify.outbox import LOCAL, SERVER, Outbox
from notify.relay.leases import Leases
from notify.relay.mover import Relayed, in_thread
from notify.relay.rows import Page, Rows
from notify.sinks.sink import Sink
from notify.wire import PackedBridgeBatch


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
        """Move a page; False if there was nothing."""
        if not self._epoch:
            if not self._leases.all():
                raise Unavailable("another relay of this database publishes; one does at a time")
            self._name = self._name or "relay-" + await in_thread(self._rows.source)
            self._epoch, position = await self._sink.claim(self._name)
            if position:
                table, names = json.loads(position)
                last = next(o for o in (LOCAL, SERVER) if o.table.name == table)
                await in_thread(self._rows.note, last, names, [])
                return True
        page: Page = await in_thread(self._rows.page, outbox)
        names = [t.id for t in page.transactions]
        if not names and not page.unreadable:
            return False
        epoch, self._epoch = self._epoch, 0  # until the batch is marked: else claim again, and see what became of it
        if names:
            position = json.dumps([outbox.table.name, names])
            batch = PackedBridgeBatch(
                epoch=epoch, expected_position="", position=position, transactions=page.transactions
            )
            await self._sink.append(self._name, batch)
        await in_thread(self._rows.note, outbox, names, page.unreadable)
        self._epoch = epoch
        self._total.sent += len(names)
        self._total.refused += len(page.unreadable)
        return True
