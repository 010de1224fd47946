"""Moves transactions to a target that recognises ids: a transaction that is sent again after a failure is stored once.

Several relays may move at the same time, even one that was frozen and wakes up, because sending twice does no harm.
"""

from __future__ import annotations

from notify.client.tables.outbox import Outbox, Place
from notify.errors import Backpressure
from notify.movers.refused import Refusal
from notify.movers.relay.mover import Relayed
from notify.movers.relay.rows import Page, Rows
from notify.movers.sinks.order import HeldBack, is_for_now
from notify.movers.sinks.sink import PutsById
from notify.runtime.threads import in_thread

STORED = (200, 201)
PAGES = 100
"""The most pages that a round reads after a transaction that the target refuses for now.

If the target accepts less than half of a page, the next page is read without the topics that it refused: a query
without these topics skips any number of their rows.
"""


class ById:
    """Moves pages of outboxes by id."""

    def __init__(self, sink: PutsById, rows: Rows, total: Relayed) -> None:
        self._sink = sink
        self._rows = rows
        self._total = total

    async def move(self, outbox: Outbox) -> bool:
        """Move waiting transactions; False if none are left. Raises Backpressure if the target accepts none now."""
        held_back = HeldBack()
        reason = ""
        wait = 0.0
        moved = is_last = False
        last: Place | None = None
        for _ in range(PAGES):
            page: Page = await in_thread(self._rows.page, outbox, last, held_back.topics)
            is_last = page.is_last
            if page.end is None:
                break
            last = page.end
            sent = [t for t in page.transactions if not held_back.holds(t)] if held_back else page.transactions
            stored, refusals = [], page.unreadable
            items = await self._sink.put(sent, page.source) if sent else []
            for transaction, item in zip(sent, items, strict=True):
                if item.status in STORED:
                    stored.append(transaction.id)
                elif is_for_now(item):
                    held_back.hold(transaction, topics=item.code == "backlog_full")
                    reason = reason or f"{item.detail} ({item.code})"
                    wait = max(wait, item.retry_after or 0.0)
                else:
                    refusals.append(Refusal.of(transaction, item))
            if stored or refusals:
                await in_thread(self._rows.note, outbox, stored, refusals)
                self._total.sent += len(stored)
                self._total.refused += len(refusals)
                moved = True
            if not held_back or page.is_last:
                break
            if len(stored) < len(sent) / 2 or not sent:
                held_back.widen()
        if held_back and not moved:
            raise Backpressure(f"the target takes nothing for now: {reason}", retry_after=wait)
        return moved and not (is_last and not held_back)

    async def rest(self) -> None:
        """Does nothing: the server sees this relay by its reports."""
