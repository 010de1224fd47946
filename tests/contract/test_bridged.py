"""What every storage with queues promises a bridge: transactions and position together, in order, from one bridge."""

from __future__ import annotations

from typing import Any

import pytest

from notify.errors import Conflict
from storage.store import BridgeBatch, BridgeState, NewTransaction, Put
from tests.contract.stores import T0, Bench, bodies
from tests.support.transactions import sent


def batch(expected: str, position: str, *transactions: NewTransaction, epoch: int = 1, **options: Any) -> BridgeBatch:
    return BridgeBatch("s", epoch, expected, position, transactions, **options)


def whole(body: bytes) -> NewTransaction:
    return sent(body, committed=True)


def test_the_position_is_durable_with_what_is_before_it(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        a, c = whole(b"a"), whole(b"c")
        await b.store.append_from_bridge(batch("", "1", a, claim=True), T0)
        await b.restart()
        again = await b.store.append_from_bridge(batch("1", "2", a, c), T0 + 1)
        assert [r.put for r in again] == [Put.ALREADY, Put.STORED]
        await b.restart()
        assert b.store.bridges() == [BridgeState("s", 1, "2", 2, T0 + 1, "1")]
        assert bodies(b.store) == [b"a", b"c"]

    run(scenario)


def test_another_position_or_an_older_bridge_changes_nothing(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.append_from_bridge(batch("", "1", claim=True), T0)
        for refused in (
            batch("0", "2", whole(b"x")),
            batch("1", "2", whole(b"x"), epoch=2),
            batch("1", "2", whole(b"x"), claim=True),
        ):
            with pytest.raises(Conflict):
                await b.store.append_from_bridge(refused, T0)
        await b.store.append_from_bridge(batch("1", "1", epoch=3, claim=True), T0)
        await b.restart()
        with pytest.raises(Conflict):
            await b.store.append_from_bridge(batch("1", "2", whole(b"x")), T0)
        assert bodies(b.store) == [] and b.store.bridges()[0].position == "1"

    run(scenario)


def test_a_large_transaction_becomes_visible_with_its_last_part_and_in_order(run: Any) -> None:
    async def scenario(b: Bench) -> None:
        await b.store.append_from_bridge(batch("", "0", claim=True), T0)
        parts = [sent(bytes([n])) for n in range(4)]
        await b.store.append_from_bridge(batch("0", "0", *parts[:2]), T0)
        await b.restart()
        await b.store.append_from_bridge(batch("0", "0", parts[2]), T0)
        assert bodies(b.store) == []
        last = [NewTransaction(t.id, t.producer_group, t.messages, committed=True) for t in (parts[2], parts[3])]
        results = await b.store.append_from_bridge(batch("0", "1", *last, commit=[t.id for t in parts[:2]]), T0)
        assert [r.put for r in results] == [Put.ALREADY, Put.STORED]
        await b.restart()
        assert bodies(b.store) == [bytes([n]) for n in range(4)]

    run(scenario)
