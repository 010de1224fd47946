"""Moving to a target that knows transactions by id: what is sent again after a failure is known there, and stored once.

Several relays may move at once, since a second sending does no harm: also one that was frozen and wakes.
"""

from __future__ import annotations

from notify.errors import Backpressure
from notify.outbox import Outbox, Place
from notify.refused import Refusal
from notify.relay.mover import Relayed, in_thread
from notify.relay.rows import Page, Rows
from notify.sinks.order import HeldBack, is_for_now
from notify.sinks.sink import PutsById
from notify.wire import BridgedTransaction, Item

PAGES = 20
"""Behind what the target refuses for now, so many pages are looked at for what it may take."""


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
            page: Page = await in_thread(self._rows.page, outbox, behind)
            if page.end is None:
                break
            behind = page.end
            sent = [t for t in page.transactions if not held.holds(t)]
            items = await self._sink.put(sent) if sent else []
            taken, refusals = _sorted(sent, items)
            refusals += page.unreadable
            if taken or refusals:
                await in_thread(self._rows.note, outbox, taken, refusals)
                self._total.sent += len(taken)
                self._total.refused += len(refusals)
                moved = True
            for t, item in zip(sent, items, strict=True):
                if is_for_now(item):
                    held.hold(t, topics=item.code == "backlog_full")
                    said = said or f"{item.detail} ({item.code})"
                    wait = max(wait, item.retry_after or 0.0)
            if not held or page.is_last:
                break
        if held and not moved:
            raise Backpressure(f"the target takes nothing for now: {said}", retry_after=wait)
        return moved


def _sorted(transactions: list[BridgedTransaction], items: list[Item]) -> tuple[list[str], list[Refusal]]:
    """The ids that the target has, and what it will never take."""
    taken: list[str] = []
    refusals: list[Refusal] = []
    for t, item in zip(transactions, items, strict=True):
        if item.status in (200, 201):
            taken.append(t.id)
        elif not is_for_now(item):
            refusals.append(Refusal.of(t, item))
    return taken, refusals
