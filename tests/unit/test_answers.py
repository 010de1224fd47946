"""A request to receive that comes again, because its answer was lost, gets the same messages with the same receipts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from notify.errors import InvalidRequest
from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, encode_msgpack
from notify.server.data.routes import _request_id
from notify.server.delivery.ack_memory import (
    MOST_FAILED,
    MOST_RUNS,
    MOST_TRACED,
    TRACE_CHARACTERS,
    AckMemory,
    Failed,
    Holder,
)
from notify.server.delivery.answers import MOST_ANSWERS
from notify.storage.groups import Subscription
from notify.storage.records import NewMessage, NewTransaction
from tests.support.delivery import SECOND, Scene

Given = list[tuple[str, bytes, int]]


async def send(s: Scene, *bodies: bytes, topic: str = "t", key: str = "k") -> None:
    messages = [NewMessage(topic, encode_msgpack(Payload(topic, body, key)), key) for body in bodies]
    await s.store.put([NewTransaction(ids.new_id(), "", messages, committed=True)], s.now_us)


async def group_of(*bodies: bytes, mode: str = "shared") -> Scene:
    s = Scene()
    await s.delivery.following.subscribe(Subscription("g", "t", mode, max_deaths=1), None)
    if bodies:
        await send(s, *bodies)
    return s


async def ask(s: Scene, request_id: str, *, instance: str = "i", wait: float = 0, most: int = 100) -> Given:
    """(receipt, payload, attempt) of each message."""
    request = Receive(instance=instance, max=most, wait=wait, lease=30)
    handed = await s.delivery.receive("g", request, request_id=request_id)
    return [(receipt, message.payload, attempt) for h in handed for receipt, message, attempt in h.each()]


async def settle(s: Scene, given: Given, action: str = "ack") -> list[int]:
    items = [SettleItem(receipt=receipt, action=action, delay=0.0) for receipt, _, _ in given]
    return [answer.status for answer in await s.delivery.settle("g", items)]


@pytest.mark.parametrize("mode", ["shared", "ordered", "failover", "exclusive"])
async def test_a_lost_answer_is_given_again_and_no_attempt_counts(mode: str) -> None:
    s = await group_of(b"a", b"b", b"c", mode=mode)
    first = await ask(s, "1")
    assert first
    s.now_us += 29 * SECOND
    await s.delivery.tick()
    assert await ask(s, "1") == first
    s.now_us += 29 * SECOND  # its leases began again
    await s.delivery.tick()
    assert await ask(s, "1") == first
    assert await settle(s, first) == [200] * len(first)
    assert (s.metrics.answers_repeated, s.metrics.delivered, s.metrics.leases_expired) == (2, len(first), 0)


async def test_attempts_and_messages_that_do_not_lie_side_by_side_are_given_again_as_they_were() -> None:
    s = await group_of(*[b"%d" % n for n in range(6)])
    given = await ask(s, "1")
    await settle(s, given[0:1] + given[3:4])
    await settle(s, given[1:2] + given[4:5], "retry")
    await settle(s, given[2:3] + given[5:6], "give_back")
    again = await ask(s, "2")
    assert sorted(attempt for _, _, attempt in again) == [1, 1, 2, 2]
    assert await ask(s, "2") == again


async def test_a_copy_of_a_request_that_comes_late_gets_nothing() -> None:
    """Its consumer has long had the answer; what is handed to the copy would wait for the end of its lease."""
    s = await group_of(b"a", b"b", b"c")
    given = await ask(s, "1", most=2)
    await settle(s, given[:1])
    assert await ask(s, "1") == []
    await settle(s, given[1:])
    assert await ask(s, "1") == []
    assert len(await ask(s, "2")) == 1


async def test_after_the_end_of_its_leases_a_request_gets_nothing_and_the_next_one_all() -> None:
    s = await group_of(b"a")
    await s.delivery.following.subscribe(Subscription("g", "t"), None)
    await ask(s, "1")
    s.now_us += 31 * SECOND
    await s.delivery.tick()
    assert await ask(s, "1") == []
    assert [attempt for _, _, attempt in await ask(s, "2")] == [2]


async def test_instances_and_requests_have_answers_of_their_own() -> None:
    s = await group_of(b"a", b"b")
    given = await ask(s, "1", most=1)
    (others,) = await ask(s, "1", instance="j")
    assert await ask(s, "2") == []
    assert await ask(s, "1") == given != [others]


async def test_only_the_last_answers_are_remembered() -> None:
    s = await group_of(*[b"%d" % n for n in range(MOST_ANSWERS + 1)])
    for number in range(MOST_ANSWERS + 1):
        assert len(await ask(s, str(number), most=1)) == 1
    answers = s.delivery.groups["g"].instances["i"].answers
    assert list(answers) == [str(number) for number in range(1, MOST_ANSWERS + 1)]


async def test_a_request_that_still_waits_is_replaced_by_its_repetition() -> None:
    """A proxy has cut the first one off, and the server does not know: what comes goes to the one that is heard."""
    s = await group_of()
    first = asyncio.ensure_future(ask(s, "1", wait=20))
    await asyncio.sleep(0)  # a turn of the loop
    second = asyncio.ensure_future(ask(s, "1", wait=20))
    assert await first == []
    await send(s, b"a")
    assert [payload for _, payload, _ in await second] != []
    assert s.delivery._waiters._by_request == {}


async def test_the_cancelled_original_takes_nothing_from_its_repetition() -> None:
    """Handed out, but not sent: both the repetition and the end of the first connection come before it is."""
    s = await group_of()
    first = asyncio.ensure_future(ask(s, "1", wait=20))
    await asyncio.sleep(0)  # a turn of the loop
    await send(s, b"a")  # hands it out
    first.cancel()
    second = await ask(s, "1")
    await asyncio.wait([first])
    assert len(second) == 1 and await settle(s, second) == [200]


async def test_messages_of_an_unsent_answer_are_handed_out_again() -> None:
    s = await group_of()
    first = asyncio.ensure_future(ask(s, "1", wait=20))
    await asyncio.sleep(0)  # a turn of the loop
    await send(s, b"a")
    first.cancel()
    await asyncio.wait([first])
    (given,) = await ask(s, "1")
    assert given[2] == 1


async def test_an_answer_is_not_given_again_to_one_who_may_not_consume_any_more() -> None:
    s: Any = await group_of(b"a")
    await ask(s, "1")
    request = Receive(instance="i")
    assert await s.delivery.receive("g", request, lambda topic: False, request_id="1") == []


def test_a_name_of_a_request_is_checked() -> None:
    assert [_request_id(query.split(b"&")) for query in (b"", b"subscribe=no", b"subscribe=no&request=a.1-Z_")] == [
        "", "", "a.1-Z_",
    ]  # fmt: skip
    for wrong in (b"a b", b"a" * 65, b"%20", b"\xff"):
        with pytest.raises(InvalidRequest):
            _request_id([b"request=" + wrong])


# --- the memory of deliveries stays within its bounds, and says nothing that is not certain -------------------------


def holder(recent: AckMemory, topic: str, queue: int, offset: int) -> Holder | None:
    """The consumer that group g's message was acknowledged by."""
    return recent.holders_of(topic, queue, offset).get("g")


@pytest.mark.long
def test_the_oldest_are_forgotten_and_since_when_is_said() -> None:
    recent = AckMemory(0)
    for n in range(MOST_RUNS + 10):
        recent.acknowledged(("g", "t", 0, [(n * 2, 1)], [(n * 2, n * 2, "i", n + 1)], n + 1))
    assert recent.since_us == 10
    assert holder(recent, "t", 0, 18) is None
    assert holder(recent, "t", 0, 20) == Holder("i", 11)
    # One request with very many runs takes as much room as many requests.
    runs = [(n * 2, 1) for n in range(MOST_RUNS)]
    recent.acknowledged(("g", "u", 0, runs, [(0, runs[-1][0], "i", 1)], 10**9))
    assert holder(recent, "t", 0, 2 * (MOST_RUNS + 9)) is None and holder(recent, "u", 0, 8) is not None


def test_nothing_is_said_that_is_not_certain() -> None:
    recent = AckMemory(0)
    recent.acknowledged(("g", "t", 0, [(0, 10)], [(0, 8, "one", 1), (1, 9, "two", 2)], 3))
    assert holder(recent, "t", 0, 0) is None  # of several consumers
    recent.acknowledged(("g", "t", 1, [(0, 10)], [(0, 6, "one", 1), (4, 8, "one", 2)], 3))
    assert holder(recent, "t", 1, 0) == Holder("one", 1)
    assert holder(recent, "t", 1, 5) == Holder("one", 0) == holder(recent, "t", 1, 9)
    assert holder(recent, "t", 2, 0) is None is holder(recent, "u", 1, 0)


def test_acknowledgements_do_not_push_failures_out() -> None:
    recent = AckMemory(0)
    recent.failed(Failed("g", "t", 0, 7, 1, "i", 1, 2, "why"))
    for n in range(MOST_RUNS * 2):
        recent.acknowledged(("g", "t", 0, [(n, 1)], [], n))
    assert [f.reason for f in recent.failures_of("t", 0, 7)] == ["why"]
    for n in range(MOST_FAILED):
        recent.failed(Failed("g", "t", 0, 8, n, "i", 1, 2, ""))
    assert recent.failures_of("t", 0, 7) == [] and len(recent.failures_of("t", 0, 8)) == MOST_FAILED


def test_tracebacks_have_a_bound_of_their_own() -> None:
    recent = AckMemory(0)
    fit = MOST_TRACED // TRACE_CHARACTERS
    for n in range(fit + 10):
        recent.failed(Failed("g", "t", 0, n, 1, "i", 1, 2, "why", trace="x" * TRACE_CHARACTERS))
    assert [(f.reason, f.trace) for f in recent.failures_of("t", 0, 9)] == [("why", "")], "its reason stays"
    assert [len(f.trace) for f in recent.failures_of("t", 0, 10)] == [TRACE_CHARACTERS]
    for n in range(MOST_FAILED):
        recent.failed(Failed("g", "u", 0, n, 1, "i", 1, 2, "why"))
    assert recent.failures_of("t", 0, fit + 9) == [] and recent.failures_of("u", 0, 0) != []
    for n in range(MOST_FAILED + fit + 10):
        recent.failed(Failed("g", "v", 0, n, 1, "i", 1, 2, "why", trace="x" * TRACE_CHARACTERS))
    last = MOST_FAILED + fit + 9
    kept = [len(recent.failures_of("v", 0, n)[0].trace) for n in (last, last - fit + 1, last - fit)]
    assert kept == [TRACE_CHARACTERS, TRACE_CHARACTERS, 0] and recent.failures_of("u", 0, MOST_FAILED - 1) == []
