"""Deaths of consumers are counted apart from failures; what a stopping consumer holds is free, within a bound."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, Subscribe, decode_payload, encode_msgpack
from notify.server.delivery.plan import FREE_INTERRUPTIONS
from notify.storage.groups import MOST_STEPS, Subscription
from notify.storage.records import NewMessage, NewTransaction
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


async def test_deaths_use_up_no_failures_and_failures_no_deaths() -> None:
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


async def test_the_last_failure_is_a_dead_letter_that_says_how_many_deaths_there_were() -> None:
    s = await group_of(max_attempts=2, max_deaths=3)
    for step in (dies, fails, dies, fails):
        assert not letters(s)
        await step(s)
    assert counted(s) == [("4", "2")]


@pytest.mark.parametrize("cut_off", [stops, is_cancelled])
async def test_a_consumer_that_is_told_to_stop_costs_nothing_within_a_bound(
    cut_off: Callable[[Scene], Awaitable[None]],
) -> None:
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


async def test_only_what_the_instance_holds_when_it_stops_is_free() -> None:
    s = await group_of(max_deaths=1)
    s.delivery.leave("g", "i")
    s.delivery.leave("g", "another")
    await dies(s)
    assert counted(s) == [("1", "1")]


async def test_a_failure_while_the_consumer_stops_is_a_failure() -> None:
    s = await group_of(max_attempts=1)
    receipts, _ = await held(s)
    s.delivery.leave("g", "i")
    await s.delivery.settle("g", [SettleItem(receipt=receipts[0], action="retry", reason="ValueError: no")])
    assert counted(s) == [("1", "0")]


async def declare(s: Scene, **bounds: int) -> None:
    """As a consumer does when it starts, a second later."""
    s.now_us += SECOND
    wanted = s.subscriptions.checked("g", "t", Subscribe(**bounds))
    await s.subscriptions.put(wanted, None, "test")


async def send(s: Scene) -> None:
    message = NewMessage("t", encode_msgpack(Payload("t", b"a")))
    await s.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], s.now_us)


@pytest.mark.parametrize("ends", [fails, dies])
async def test_a_message_that_waits_keeps_the_larger_bound_and_later_ones_get_the_smaller(
    ends: Callable[[Scene], Awaitable[None]],
) -> None:
    s = await group_of(max_attempts=5, max_deaths=5)
    for _ in range(3):
        await ends(s)
    await declare(s, max_attempts=3, max_deaths=3)
    s.restart()
    await ends(s)
    assert not letters(s), "it began under five"
    await ends(s)
    assert [attempts for attempts, _ in counted(s)] == ["5"]
    await send(s)
    for _ in range(3):
        await ends(s)
    assert [attempts for attempts, _ in counted(s)] == ["5", "3"]


async def test_a_larger_bound_counts_at_once() -> None:
    s = await group_of(max_attempts=2)
    await fails(s)
    await declare(s, max_attempts=3)
    await fails(s)
    assert not letters(s)
    await fails(s)
    assert counted(s) == [("3", "0")]


async def test_versions_that_declare_in_turns_leave_one_step_and_say_how_often() -> None:
    s = await group_of(max_attempts=16)
    for number in range(30):
        await declare(s, max_attempts=3 if number % 2 == 0 else 16)
    await send(s)
    await declare(s, max_attempts=3)
    (subscription,) = [one for one in s.store.subscriptions() if one.topic == "t"]
    assert subscription.earlier == ((s.now_us, 16, 16),)
    shown = s.subscriptions.changes("g", "t")
    assert shown["changes_last_hour"] == 31
    assert [c["what"] for c in shown["changes"]][:2] == ["max_attempts 16 → 3", "max_attempts 3 → 16"]
    assert {c["by"] for c in shown["changes"]} == {"test"}
    await declare(s, max_attempts=3)
    assert s.subscriptions.changes("g", "t")["changes_last_hour"] == 31, "nothing has changed"
    s.now_us += 3600 * SECOND
    assert s.subscriptions.changes("g", "t")["changes_last_hour"] == 0


def test_the_steps_are_bounded_and_none_gets_smaller() -> None:
    now = Subscription("g", "t", max_attempts=100)
    for number in range(1, 40):
        changed = replace(now, max_attempts=100 - number, earlier=now.earlier_than(number, 100 - number, 16))
        assert len(changed.earlier) <= MOST_STEPS
        for committed_us in range(number):
            assert changed.bounds(committed_us)[0] >= now.bounds(committed_us)[0]
        now = changed
    assert now.bounds(0) == (100, 16)
    assert now.bounds(38) == (62, 16)
    assert now.bounds(39) == (61, 16)
