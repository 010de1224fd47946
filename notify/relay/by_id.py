"""Moving to a target that knows transactions by id: what is sent again after a failure is known there, and stored once.

Several relays may move at once, since a second sending does no harm: also one that was frozen and wakes.
"""

from __future__ import annotations

from notify.errors import Backpressure
from notify.outbox import Outbox, Place
from notify.refused import Refusal
from notify.relay.mover import Relayed
from notify.relay.rows import Page, Rows
from notify.sinks.order import HeldBack, is_for_now
from notify.sinks.sink import PutsById
from notify.threads import in_thread

TAKEN = (200, 201)
PAGES = 100
"""A round reads at most so many pages behind a transaction that the target refuses for now.

Where the target takes less than half of a page, the next page is read without the topics that it refused: a query that
leaves them out passes over any number of their rows at once.
"""


class ById:
    """Moves pages of outboxes."""

    def __init__(self, sink: PutsById, rows: Rows, total: Relayed) -> None:
        self._sink = sink
        self._rows = rows
        self._total = total

    async def move(self, outbox: Outbox) -> bool:
        """Move what waits; False if there was nothing. Raises Backpressure where the target takes nothing for now."""
        held = HeldBack()
        said = ""
        wait = 0.0
        moved = False
        behind: Place | None = None
        for _ in range(PAGES):
            page: Page = await in_thread(self._rows.page, outbox, behind, held.topics)
            if page.end is None:
                break
            behind = page.end
            sent = [t for t in page.transactions if not held.holds(t)] if held else page.transactions
            taken, refusals = [], page.unreadable
            for t, item in zip(sent, await self._sink.put(sent) if sent else (), strict=True):
                if item.status in TAKEN:
                    taken.append(t.id)
                elif is_for_now(item):
                    held.hold(t, topics=item.code == "backlog_full")
                    said = said or f"{item.detail} ({item.code})"
                    wait = max(wait, item.retry_after or 0.0)
                else:
                    refusals.append(Refusal.of(t, item))
            if taken or refusals:
                await in_thread(self._rows.note, outbox, taken, refusals)
                self._total.sent += len(taken)
                self._total.refused += len(refusals)
                moved = True
            if not held or page.is_last:
                break
            if len(taken) < len(sent) / 2 or not sent:
                held.widen()
        if held and not moved:
            raise Backpressure(f"the target takes nothing for now: {said}", retry_after=wait)
        return moved
