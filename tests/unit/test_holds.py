"""A key that is held: its message has used up its attempts, other keys continue, and people decide."""

from __future__ import annotations

from typing import Any

import pytest

from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, Subscribe, decode_payload, encode_msgpack
from notify.server.delivery import ordered
from notify.server.delivery.holds import HeldKey
from notify.storage.groups import Subscription
from notify.storage.records import NewMessage, NewTransaction
from tests.support.delivery import SECOND, Scene

LETTERS = "dead-letter.g"


async def scene(*bodies: str, **changes: Any) -> Scene:
    """A group that holds keys after two failures; a body's first letter is its key, and `-` means none."""
    s = Scene()
    fields: dict[str, Any] = {"mode": "ordered", "max_attempts": 2, "on_exhausted": "hold"}
    await s.delivery.following.subscribe(Subscription("g", "t", **fields | changes), None)
    await put(s, *bodies)
    return s


async def put(s: Scene, *bodies: str) -> None:
    for body in bodies:
        key = None if body[0] == "-" else body[0]
        message = NewMessage("t", encode_msgpack(Payload("t", body.encode(), key)), key=key)
        await s.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], s.now_us)


async def receive(s: Scene, most: int = 100) -> dict[str, str]:
    """The receipts of what an instance is handed, by body."""
    handed = await s.delivery.receive("g", Receive(instance="i", lease=30, max=most))
    return {decode_payload(message.payload).body.decode(): receipt for h in handed for receipt, message, _ in h.each()}


async def settle(s: Scene, action: str, *receipts: str) -> None:
    items = [SettleItem(receipt=receipt, action=action, delay=0.0, reason="boom") for receipt in receipts]
    if items:
        assert [answer.status for answer in await s.delivery.settle("g", items)] == [200] * len(items)


async def fail(s: Scene, body: str, times: int = 2) -> list[str]:
    """Fail a message so often, and acknowledge what comes with it; the bodies of that."""
    others: list[str] = []
    for _ in range(times):
        came = await receive(s)
        await settle(s, "retry", came.pop(body))
        await s.delivery.tick()  # the next attempt is due
        await settle(s, "ack", *came.values())
        others += came
    return others


def held(s: Scene) -> list[HeldKey]:
    return list(s.delivery.groups["g"].holds)


def letters(s: Scene) -> list[dict[str, str]]:
    """The headers of the group's dead letters."""
    if not s.store.has_topic(LETTERS):
        return []
    return [decode_payload(m.payload).headers or {} for m in s.store.read(LETTERS, 0, 0, 100, 1 << 20)]


async def test_the_key_stops_and_others_go_on() -> None:
    s = await scene("a1", "b1", "a2", "-1", "b2")
    assert await fail(s, "a1") == ["b1", "-1", "b2"]
    await put(s, "a3", "b3")
    assert list(await receive(s)) == ["b3"]
    (key,) = held(s)
    assert (key.offset, key.hold.reason, key.hold.since_us) == (0, "boom", s.now_us)
    assert (key.cursor.waiting_for(0), s.metrics.held, letters(s)) == (2, 1, [])


async def test_deaths_hold_a_key_too() -> None:
    s = await scene("a1", "a2", max_deaths=1)
    assert list(await receive(s)) == ["a1"]
    s.now_us += 31 * SECOND
    await s.delivery.tick()
    assert "death" in held(s)[0].hold.reason and await receive(s) == {}


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_retry_is_one_more_attempt(restarts: bool) -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    if restarts:
        s.restart()
    assert await receive(s) == {}
    s.delivery.groups["g"].holds.retry(held(s)[0], s.now_us)
    assert held(s) == []
    if restarts:
        s.restart()
    await fail(s, "a1", times=1)
    assert len(held(s)) == 1
    s.delivery.groups["g"].holds.retry(held(s)[0], s.now_us)
    await settle(s, "ack", *(await receive(s)).values())
    assert list(await receive(s)) == ["a2"]
    assert held(s) == []


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_release_gives_all_attempts_again(restarts: bool) -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    s.delivery.groups["g"].holds.release(held(s)[0], s.now_us)
    if restarts:
        s.restart()
    await fail(s, "a1", times=1)
    assert held(s) == []
    await fail(s, "a1", times=1)
    assert len(held(s)) == 1
    handed = s.store.progress("g", "t", 0).attempts
    assert handed == {0: 4}  # what was forgiven is not forgotten


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_skipped_message_is_a_dead_letter_and_its_key_goes_on(restarts: bool) -> None:
    s = await scene("a1", "a2", "a3")
    await fail(s, "a1")
    if restarts:
        s.restart()
    s.delivery.groups["g"].holds.skip(held(s)[0], "a wrong address", s.now_us)
    assert held(s) == []
    (letter,) = letters(s)
    assert letter["notify-dead-letter-reason"] == "a wrong address"
    assert (letter["notify-dead-letter-attempts"], letter["notify-dead-letter-offset"]) == ("2", "0")
    came = await receive(s)
    assert list(came) == ["a2"]
    await settle(s, "ack", *came.values())
    assert list(await receive(s)) == ["a3"]


async def test_a_message_without_a_key_becomes_a_dead_letter() -> None:
    s = await scene("-1", "-2")
    await fail(s, "-1")
    assert (held(s), len(letters(s))) == ([], 1)


async def test_a_consumer_that_gives_up_passes_its_key() -> None:
    s = await scene("a1", "a2")
    await settle(s, "dead_letter", *(await receive(s)).values())
    assert (held(s), len(letters(s)), list(await receive(s))) == ([], 1, ["a2"])


async def test_held_keys_stay_held_with_another_setting() -> None:
    s = await scene("a1", "a2", "b1")
    await fail(s, "a1")
    plain = Subscription("g", "t", mode="ordered", max_attempts=1)
    await s.delivery.following.subscribe(plain, None)
    assert len(held(s)) == 1
    await put(s, "c1", "c2")
    await fail(s, "c1", times=1)
    assert (len(held(s)), len(letters(s)), list(await receive(s))) == (1, 1, ["c2"])


async def test_another_mode_delivers_what_was_held() -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    await s.delivery.following.subscribe(Subscription("g", "t", mode="shared"), None)
    assert (list(await receive(s)), held(s)) == (["a1", "a2"], [])


@pytest.mark.parametrize("bound", ["MOST_HELD", "MOST_BEHIND_HELD"])
async def test_beyond_its_bound_the_queue_stops_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(ordered, bound, 1)
    s = await scene("a1", "a2")
    await fail(s, "a1")
    group = s.delivery.groups["g"]
    await put(s, "b1", "b2")
    assert await receive(s) == {}
    assert [cursor.queue for cursor in group.holds.held_up()] == [0]
    s.restart()
    group = s.delivery.groups["g"]
    assert await receive(s, most=1) == {}  # the message behind the held one is read again
    group.holds.skip(held(s)[0], "skipped", s.now_us)
    assert sorted(await receive(s)) == ["a2", "b1"]
    assert list(group.holds.held_up()) == []


async def test_messages_behind_a_held_key_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "WAITING_BOUND", 3)
    s = await scene("a1", *["a2"] * 10)
    await fail(s, "a1")
    await put(s, "b1")
    assert list(await receive(s)) == ["b1"]
    s.delivery.groups["g"].holds.skip(held(s)[0], "skipped", s.now_us)
    await put(s, "c1")
    assert sorted(await receive(s)) == ["a2", "c1"]


async def test_a_message_that_retention_dropped_holds_no_key() -> None:
    s = await scene("a1", "a2", "a3")
    await fail(s, "a1")
    s.store.trim("t", 0, 1)
    s.restart()
    assert (list(await receive(s)), held(s)) == (["a2"], [])


async def test_a_purge_lets_go_of_the_keys_of_what_it_dropped() -> None:
    """Later messages of the key waited for a message that nobody could see, until the next start."""
    s = await scene("a1", "a2")
    await fail(s, "a1")
    s.store.trim("t", 0, 2)
    s.delivery.dropped("t")
    await put(s, "a3")
    assert held(s) == []
    assert list(await receive(s)) == ["a3"]
    assert letters(s) == [] and s.store.progress("g", "t", 0).is_settled(0)


async def test_a_purge_below_a_held_message_leaves_it() -> None:
    s = await scene("b1", "a1", "a2")
    assert await fail(s, "a1") == ["b1"]
    s.store.trim("t", 0, 1)
    s.delivery.dropped("t")
    assert len(held(s)) == 1 and await receive(s) == {}


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_topic_that_is_made_again_holds_nothing(restarts: bool) -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    await s.delivery.following.delete_topic("t")
    assert "g" not in s.delivery.groups or held(s) == []
    if restarts:
        s.restart()
    await s.delivery.following.subscribe(Subscription("g", "t", mode="ordered", on_exhausted="hold"), None)
    await put(s, "a3")
    assert (held(s), list(await receive(s))) == ([], ["a3"])


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_group_that_is_made_again_holds_nothing(restarts: bool) -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    await s.delivery.following.unsubscribe("g", "t")
    if restarts:
        s.restart()
    again = Subscription("g", "t", mode="ordered", on_exhausted="hold", max_attempts=2)
    await s.delivery.following.subscribe(again, "earliest")
    assert (held(s), list(await receive(s))) == ([], ["a1"])


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_reset_ends_all_holds(restarts: bool) -> None:
    s = await scene("a1", "a2", "b1")
    await fail(s, "a1")
    subscription = s.store.subscription("g", "t")
    assert subscription is not None
    await s.delivery.following.reset(subscription, "earliest")
    if restarts:
        s.restart()
    assert (held(s), sorted(await receive(s))) == ([], ["a1", "b1"])
    await s.delivery.tick()


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_mode_that_changes_to_and_fro_loses_nothing_and_keeps_the_order(restarts: bool) -> None:
    """A message that failed in between is no longer held, and holds its key again if it fails again."""
    s = await scene("a1", "a2", "b1")
    await fail(s, "a1")
    ordered_again = s.store.subscription("g", "t")
    assert ordered_again is not None
    await s.delivery.following.subscribe(Subscription("g", "t", mode="shared", max_attempts=9), None)
    came = await receive(s)
    assert sorted(came) == ["a1", "a2"]
    await settle(s, "retry", came["a1"])
    if restarts:
        s.restart()
    await s.delivery.following.subscribe(ordered_again, None)
    assert held(s) == []
    await s.delivery.tick()
    came = await receive(s)
    assert list(came) == ["a1"]
    await settle(s, "retry", came["a1"])
    assert len(held(s)) == 1 and await receive(s) == {}
    s.delivery.groups["g"].holds.skip(held(s)[0], "skipped", s.now_us)
    assert list(await receive(s)) == ["a2"]


async def test_a_purged_message_is_settled_by_any_decision() -> None:
    s = await scene("a1", "a2")
    await fail(s, "a1")
    s.store.trim("t", 0, 1)
    group = s.delivery.groups["g"]
    assert group.holds.message(held(s)[0]) == ("", "")
    group.holds.retry(held(s)[0], s.now_us)
    await receive(s)
    assert (list(await receive(s)), held(s), letters(s)) == ([], [], [])
    assert s.store.progress("g", "t", 0).is_settled(0)


@pytest.mark.parametrize("mode", ["shared", "exclusive", "failover", "broadcast"])
def test_only_ordered_mode_holds(mode: str) -> None:
    s = Scene()
    with pytest.raises(InvalidRequest, match="needs mode ordered"):
        s.subscriptions.checked("g", "t", Subscribe(mode=mode, on_exhausted="hold"))
    with pytest.raises(InvalidRequest, match="dead_letter or hold"):
        s.subscriptions.checked("g", "t", Subscribe(mode="ordered", on_exhausted="stop"))
