"""Deaths of consumers are counted apart from failures; what a stopping consumer holds is free, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from notify import ids
from notify.server.delivery.plan import FREE_INTERRUPTIONS
from notify.storage.groups import Subscription
from notify.storage.records import NewMessage, NewTransaction
from notify.wire import Payload, Receive, SettleItem, decode_payload, encode_msgpack
from tests.support.delivery import SECOND, Scene

LETTERS = "dead-letter.g"


async def group_of(**bounds: int) -> Scene:
    """A group with one message to receive."""
    s = Scene()
    await s.delivery.following.subscribe(Subscription("g", "t", **bounds), None)
    message = NewMessage("t", encode_msgpack(Payload("t", b"a")))
    await s.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], s.now_us)
    return s


async def held(s: Scene) -> tuple[list[str], list[int]]:
    """(the receipts, the attempts) of what an instance is handed."""
    handed = await s.delivery.receive("g", Receive(instance="i", lease=30))
    each = [one for h in handed for one in h.each()]
    return [receipt for receipt, _, _ in each], [attempt for _, _, attempt in each]


async def settle(s: Scene, receipts: list[str], action: str) -> list[int]:
    """The status of each item."""
    items = [SettleItem(receipt=receipt, action=action, delay=0.0) for receipt in receipts]
    return [answer.status for answer in await s.delivery.settle("g", items)]


async def dies(s: Scene) -> None:
    await held(s)
    s.now_us += 31 * SECOND
    await s.delivery.tick()


async def stops(s: Scene) -> None:
    await held(s)
    s.delivery.leave("g", "i")
    s.now_us += 31 * SECOND
    await s.delivery.tick()


async def is_cancelled(s: Scene) -> None:
    receipts, _ = await held(s)
    assert await settle(s, receipts, "interrupted") == [200]


async def fails(s: Scene) -> None:
    receipts, _ = await held(s)
    await settle(s, receipts, "retry")
    await s.delivery.tick()  # it is due at once


def letters(s: Scene) -> list[dict[str, str]]:
    """The headers of the dead letters."""
    if not s.store.has_topic(LETTERS):
        return []
    return [decode_payload(m.payload).headers or {} for m in s.store.read(LETTERS, 0, 0, 100, 1 << 20)]


def counted(s: Scene) -> list[tuple[str, str]]:
    return [(h["notify-dead-letter-attempts"], h["notify-dead-letter-deaths"]) for h in letters(s)]


def test_deaths_use_up_no_failures_and_failures_no_deaths() -> None:
    async def scenario() -> None:
        s = await group_of(max_attempts=2, max_deaths=3)
        await dies(s)
        await dies(s)
        await fails(s)
        assert not letters(s)
        assert (await held(s))[1] == [4], "an attempt is each time that it was handed out and not settled"
        s.now_us += 31 * SECOND
        await s.delivery.tick()
        assert counted(s) == [("4", "3")]
        assert letters(s)[0]["notify-dead-letter-reason"] == (
            "1 attempt failed, 3 attempts ended with the death of the consumer, whose lease ran out"
        )

    asyncio.run(scenario())


def test_the_last_failure_is_a_dead_letter_that_says_how_many_deaths_there_were() -> None:
    async def scenario() -> None:
        s = await group_of(max_attempts=2, max_deaths=3)
        for step in (dies, fails, dies, fails):
            assert not letters(s)
            await step(s)
        assert counted(s) == [("4", "2")]

    asyncio.run(scenario())


@pytest.mark.parametrize("cut_off", [stops, is_cancelled])
def test_a_consumer_that_is_told_to_stop_costs_nothing_within_a_bound(
    cut_off: Callable[[Scene], Awaitable[None]],
) -> None:
    async def scenario() -> None:
        s = await group_of(max_attempts=1, max_deaths=2)
        for _ in range(FREE_INTERRUPTIONS):
            await cut_off(s)
        receipts, attempts = await held(s)
        assert (attempts, s.metrics.interrupted, letters(s)) == ([1], FREE_INTERRUPTIONS, [])
        await settle(s, receipts, "give_back")
        await cut_off(s)
        assert not letters(s)
        await cut_off(s)
        assert counted(s) == [("2", "2")], "a message that keeps its consumers from stopping"

    asyncio.run(scenario())


def test_only_what_the_instance_holds_when_it_stops_is_free() -> None:
    async def scenario() -> None:
        s = await group_of(max_deaths=1)
        s.delivery.leave("g", "i")
        s.delivery.leave("g", "another")
        await dies(s)
        assert counted(s) == [("1", "1")]

    asyncio.run(scenario())


def test_a_failure_while_the_consumer_stops_is_a_failure() -> None:
    async def scenario() -> None:
        s = await group_of(max_attempts=1)
        receipts, _ = await held(s)
        s.delivery.leave("g", "i")
        await s.delivery.settle("g", [SettleItem(receipt=receipts[0], action="retry", reason="ValueError: no")])
        assert counted(s) == [("1", "0")]

    asyncio.run(scenario())


def test_the_numbers_can_change_while_a_message_waits() -> None:
    async def scenario() -> None:
        s: Any = await group_of(max_deaths=5)
        await dies(s)
        await s.delivery.following.subscribe(Subscription("g", "t", max_deaths=2), None)
        await dies(s)
        assert counted(s) == [("2", "2")]

    asyncio.run(scenario())
