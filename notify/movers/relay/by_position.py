"""Moves transactions to a target that knows no ids: the position names a published batch, which is then only marked.

Only one relay of a source publishes at a time: the relay that holds all buckets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

from notify.client.tables.outbox import Outbox, Place
from notify.errors import Conflict, InvalidRequest
from notify.movers.outbox import OUTBOXES
from notify.movers.refused import Refusal
from notify.movers.relay.leases import Leases
from notify.movers.relay.mover import MovesElsewhere, Relayed
from notify.movers.relay.rows import PAGE_BYTES, Page, Rows
from notify.movers.returned import moment_of
from notify.movers.sinks.sink import TRAILER_SECONDS, Sink, pace_of
from notify.protocol.wire import BridgedTransaction, Item, PackedBridgeBatch
from notify.runtime.clock import wall_clock
from notify.runtime.threads import in_thread


class ByPosition:
    """Moves pages of outboxes by position."""

    def __init__(
        self,
        sink: Sink,
        rows: Rows,
        leases: Leases,
        total: Relayed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._most_bytes = pace_of(sink, PAGE_BYTES)
        self._rows = rows
        self._leases = leases
        self._total = total
        self._name = ""
        self._epoch = 0
        self._clock = clock
        self._written = 0.0
        """When this relay last wrote a position to the target."""
        self._sent_until: dict[str, datetime] = {}
        """The time of the newest transaction that the target got, by table."""

    async def move(self, outbox: Outbox) -> bool:
        """Move a page; False if there was nothing to move.

        Raises MovesElsewhere while another relay holds the leases, or if it published last: then the target is claimed
        again.
        """
        try:
            return await self._move(outbox)
        except Conflict as error:
            raise MovesElsewhere(f"another relay of this source published last: {error}") from error

    async def _move(self, outbox: Outbox) -> bool:
        if not self._epoch:
            if not self._leases.all():
                raise MovesElsewhere("another relay of this source publishes; one does at a time")
            self._name = self._name or "relay-" + await in_thread(self._rows.source)
            epoch, position = await self._sink.claim(self._name)
            if position and not position.startswith("["):
                raise InvalidRequest(
                    f"a bridge has taken this source over ({position[:100]}), and marks no rows: a relay would publish "
                    "again what it has moved. Run the bridge, and no relay"
                )
            if position:
                table, published, *marks = json.loads(position)
                for name, at in (marks[0] if marks else {}).items():
                    self._sent_until[name] = datetime.fromisoformat(at)
                last_outbox = next(each for each in OUTBOXES if each.table.name == table)
                await in_thread(self._rows.note, last_outbox, published, [])
            self._written = self._clock()
            self._epoch = epoch  # only after the last batch is marked, which would be published again otherwise
        # Before it has sent anything to this target, whatever waits is new to it.
        sent_until = self._sent_until.get(outbox.table.name, datetime.min)
        page: Page = await in_thread(self._rows.page, outbox, None, (), sent_until, self._most_bytes())
        if not page.transactions and not page.unreadable:
            if self._clock() - self._written >= TRAILER_SECONDS:
                await self._say_alive(outbox)
            return False
        epoch, self._epoch = self._epoch, 0  # if marking the batch fails, claim again to learn whether it was published
        if page.end is not None and page.transactions:
            self._note_time(outbox, page.end)
        published, refusals = await self._publish(outbox, page.transactions, epoch)
        await in_thread(self._rows.note, outbox, published, refusals + page.unreadable)
        self._epoch = epoch
        self._total.sent += len(published)
        self._total.refused += len(refusals) + len(page.unreadable)
        return True

    def _note_time(self, outbox: Outbox, end: Place) -> None:
        """Remember the time of the newest transaction of a page, by which rows that came back are recognised later."""
        moment = moment_of(end.at)
        if moment is None:
            return
        now = datetime.fromtimestamp(wall_clock() / 1e6, UTC).replace(tzinfo=None)  # a row's time may be in the future
        self._sent_until[outbox.table.name] = max(
            min(moment, now), self._sent_until.get(outbox.table.name, datetime.min)
        )

    async def rest(self) -> None:
        """See Mover. Half of the time between two signs of life, because it is called about as often as they are due.

        Raises MovesElsewhere if another relay published last.
        """
        if self._epoch and self._clock() - self._written >= TRAILER_SECONDS / 2:
            try:
                await self._say_alive(OUTBOXES[0])
            except Conflict as error:
                raise MovesElsewhere(f"another relay of this source published last: {error}") from error

    async def _say_alive(self, outbox: Outbox) -> None:
        """Write a position that names no transaction: the last batch is marked, and nothing has followed."""
        epoch, self._epoch = self._epoch, 0
        await self._append(outbox, [], epoch)
        self._epoch = epoch

    async def _publish(
        self, outbox: Outbox, transactions: list[BridgedTransaction], epoch: int
    ) -> tuple[list[str], list[Refusal]]:
        """Append the transactions that the target accepts; their ids, and refusals of the others."""
        refusals: list[Refusal] = []
        while transactions:
            refused = {item.id: item for item in await self._append(outbox, transactions, epoch)}
            if not refused:
                return [t.id for t in transactions], refusals
            refusals += [Refusal.of(t, refused[t.id]) for t in transactions if t.id in refused]
            transactions = [t for t in transactions if t.id not in refused]
        return [], refusals

    async def _append(self, outbox: Outbox, transactions: list[BridgedTransaction], epoch: int) -> list[Item]:
        """Append transactions and the position that names them; an item for each that will never be accepted."""
        marks = {name: at.isoformat() for name, at in self._sent_until.items()}
        position = json.dumps([outbox.table.name, [t.id for t in transactions], *([marks] if marks else [])])
        batch = PackedBridgeBatch(epoch=epoch, expected_position="", position=position, transactions=transactions)
        answer = await self._sink.append(self._name, batch)
        self._written = self._clock()
        return answer.refused
