"""A relay to a target that knows no ids writes its position also while it has nothing to move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from notify.movers.outbox import OUTBOXES
from notify.movers.relay.by_position import ByPosition
from notify.movers.relay.leases import Leases
from notify.movers.relay.mover import Relayed
from notify.movers.relay.rows import Page, Rows
from notify.movers.sinks.sink import TRAILER_SECONDS, Sink
from notify.protocol.wire import Bridged, BridgedTransaction, PackedBridgeBatch

OUTBOX = OUTBOXES[0]
NOTHING = f'["{OUTBOX.table.name}", []]'


class Target:
    def __init__(self) -> None:
        self.positions: list[str] = []

    async def claim(self, source: str) -> tuple[int, str]:
        return 1, self.positions[-1] if self.positions else ""

    async def append(self, source: str, batch: PackedBridgeBatch) -> Bridged:
        self.positions.append(batch.position)
        return Bridged(batch.position, batch.epoch)


class Waiting:
    """The rows of an outbox: each page is one transaction."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.marked: list[str] = []

    def source(self) -> str:
        return "shop"

    def page(self, outbox: object, *_: object) -> Page:
        ids, self.ids = self.ids[:1], self.ids[1:]
        return Page([BridgedTransaction(each, "g", []) for each in ids])

    def note(self, outbox: object, sent: Sequence[str], refusals: Sequence[object]) -> None:
        self.marked += sent


class Run:
    def __init__(self, target: Target) -> None:
        self.now, self.rows = 1000.0, Waiting()
        leases: Any = SimpleNamespace(all=lambda: True)
        self.mover = ByPosition(
            cast(Sink, target), cast(Rows, self.rows), cast(Leases, leases), Relayed(), clock=lambda: self.now
        )

    def look(self, after_seconds: float = 0.0) -> bool:
        self.now += after_seconds
        return asyncio.run(self.mover.move(OUTBOX))


def test_an_idle_relay_shows_that_it_runs() -> None:
    """The alarm `bridge`, `doctor` and the metric called a relay to Kafka stalled once nobody had sent for 30 s."""
    target = Target()
    run = Run(target)
    assert not run.look()
    assert target.positions == [], "the claim has just written one"
    run.look(TRAILER_SECONDS / 2)
    assert target.positions == []
    assert not run.look(TRAILER_SECONDS / 2)
    assert target.positions == [NOTHING]
    run.look(TRAILER_SECONDS / 2)
    assert target.positions == [NOTHING]
    run.rows.ids = ["a"]
    assert run.look()
    assert len(target.positions) == 2, "a batch is a sign of life, too"
    run.look(TRAILER_SECONDS - 1)
    assert len(target.positions) == 2
    run.look(1)
    assert target.positions[2:] == [NOTHING]


def test_a_relay_goes_on_from_a_position_that_names_nothing() -> None:
    target = Target()
    target.positions = [NOTHING]
    run = Run(target)
    run.rows.ids = ["a"]
    assert run.look()
    assert (run.rows.marked, target.positions[1:]) == (["a"], [f'["{OUTBOX.table.name}", ["a"]]'])
