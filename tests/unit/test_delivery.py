"""Delivery over memory, on a clock that the test moves: groups that follow topics, leases, instances, growth."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from notify.errors import Conflict, InvalidRequest, NotFound, NotifyError, UnknownTopic
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Payload, Receive, SettleItem, decode_payload, encode_msgpack
from notify.server.delivery.broadcast import INSTANCE_IDLE_US, MOST_BROADCAST_INSTANCES
from notify.server.delivery.cursor import RUNS_BOUND
from notify.server.delivery.pace import LEAST_SHARE, STALE_US, WINDOW_US, Pace
from notify.server.metrics import Metrics
from notify.storage.groups import Subscription
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import MOST_GROWN, Topic
from tests.support.clock import PATIENCE_SECONDS
from tests.support.delivery import SECOND, Scene


class Groups(Scene):
    """A delivery, and the consumers of group `g`."""

    async def send(self, topic: str, *bodies: str, keyed: bool = False) -> None:
        """Publish messages without a transaction; with `keyed` the key is the body up to the first dash."""
        for body in bodies:
            key = body.partition("-")[0] if keyed else None
            message = NewMessage(topic, encode_msgpack(Payload(topic, body.encode(), key)), key)
            await self.store.put([NewTransaction(ids.new_id(), "", [message], committed=True)], self.now_us)

    async def receive(
        self,
        *,
        instance: str = "i",
        limit: int = 100,
        lease: float = 30,
        topics: list[str] | None = None,
        may: Any = None,
    ) -> dict[str, str]:
        """The bodies that were handed out, by receipt."""
        request = Receive(instance=instance, max=limit, lease=lease, topics=topics)
        handed = await self.delivery.receive("g", request, may)
        return {r: bytes(decode_payload(m.payload).body).decode() for h in handed for r, m, _ in h.each()}

    async def settle(self, receipts: Any, action: str = "ack", may: Any = None) -> list[int]:
        items = [SettleItem(receipt=receipt, action=action, delay=0.0) for receipt in receipts]
        return [answer.status for answer in await self.delivery.settle("g", items, may)]

    def group(self) -> Any:
        return self.delivery.groups["g"]


async def test_a_pattern_follows_topics_however_they_are_made() -> None:
    s = Groups()
    await s.delivery.following.subscribe_pattern(Subscription("g", "order.*"), None)
    await s.delivery.following.subscribe(Subscription("other", "order.placed"), None)
    await s.delivery.receive("another", Receive(instance="x", topics=["order.sent"]))
    s.topics.use("order.paid")
    s.topics.put_soon(Topic("order.gone"))
    for topic in ("placed", "sent", "paid", "gone"):
        await s.send(f"order.{topic}", topic)
    assert len(await s.receive()) == 4


async def test_a_group_waits_for_the_first_topic_of_its_pattern() -> None:
    """A consumer may come before the first producer. It ended with an error."""
    s = Groups()
    await s.delivery.following.subscribe_pattern(Subscription("g", "order.*"), None)
    assert await s.receive() == {}
    waiting = asyncio.ensure_future(s.delivery.receive("g", Receive(instance="i", wait=30)))
    await asyncio.sleep(0)  # the poll begins to wait
    s.topics.use("order.placed")
    await s.send("order.placed", "first")
    assert [len(h.messages) for h in await waiting] == [1]
    with pytest.raises(NotFound):
        await s.delivery.receive("another", Receive(instance="i"))


async def test_a_request_with_patterns_gets_the_topics_that_match_alone() -> None:
    """A consumer with a pattern got the messages of all topics of its group, and failed for want of a handler."""
    s = Groups()
    await s.delivery.following.subscribe_pattern(Subscription("g", "order.*"), None)
    await s.delivery.following.subscribe(Subscription("g", "named"), "earliest")
    await s.delivery.following.subscribe(Subscription("g", "another"), "earliest")
    for topic in ("order.old", "named", "another"):
        s.topics.use(topic)
        await s.send(topic, topic)
    asked = Receive(instance="i", topics=["order.*", "named"], wait=30)
    handed = await s.delivery.receive("g", asked, subscribes=False)
    assert {h.messages[0].topic for h in handed} == {"order.old", "named"}
    waiting = asyncio.ensure_future(s.delivery.receive("g", asked, lambda topic: topic != "order.secret"))
    await asyncio.sleep(0)  # the poll begins to wait
    for topic in ("another", "order.secret", "order.new"):
        s.topics.use(topic)
        await s.send(topic, topic)
    assert {h.messages[0].topic for h in await waiting} == {"order.new"}
    readers = s.group().readers
    asked_for = {name for name in ("order.new", "order.secret", "named", "another") if readers.has(name, s.now_us)}
    assert asked_for == {"order.new", "named"}
    with pytest.raises(NotFound, match=r"no subscription to topic 'order\.x\*'"):
        await s.delivery.receive("g", Receive(instance="i", topics=["order.x*"]), subscribes=False)


async def test_a_message_that_fails_for_ever_does_not_stop_its_queue() -> None:
    """The memory kept for a queue grows with its gaps, not with the messages that were settled behind them."""
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", max_attempts=1000), "earliest")
    await s.send("t", "poison")
    poison = await s.receive(limit=1)
    payload = encode_msgpack(Payload("t", b"x"))
    many = [NewMessage("t", payload)] * 5000
    for _ in range(RUNS_BOUND // 5000 + 1):
        await s.store.put([NewTransaction(ids.new_id(), "", many, committed=True)], s.now_us)
        handed = await s.delivery.receive("g", Receive(instance="i", max=5000))
        assert [len(h.messages) for h in handed] == [5000]
        await s.delivery.settle("g", [SettleItem(receipt=f"{h.token}0-4999", action="ack") for h in handed])
    assert s.group().lag() == 1
    assert list(s.store.progress("g", "t", 0).settled) == [(1, 5000 * (RUNS_BOUND // 5000 + 1))]
    assert await s.settle(poison) == [200]
    assert s.group().lag() == 0


async def test_an_instance_alone_gets_messages_after_its_leases_ran_out() -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t"), "earliest")
    await s.send("t", *[f"m{n}" for n in range(40)])
    held = await s.receive(limit=10, lease=3600)
    assert len(await s.receive(limit=10, lease=1)) == 10
    s.now_us += 2 * SECOND
    await s.delivery.tick()
    assert len(await s.receive(limit=15)) == 15
    assert len(held) == 10
    # Beside another instance, leases that ran out lower its bound, and it still gets one message.
    await s.receive(instance="other", limit=1)
    assert len(await s.receive(limit=10)) == 1


async def test_a_receipt_cannot_be_guessed() -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t"), "earliest")
    await s.send("t", "a", "b")
    first, second = [next(iter(await s.receive(limit=1))) for _ in range(2)]
    low, high = sorted(int(receipt.partition(".")[0], 16) for receipt in (first, second))
    assert high - low > 1 << 16
    assert await s.settle([f"{low + 1:x}.0"]) == [410]


async def test_rights_are_asked_when_a_message_is_handed_out_and_when_it_is_settled() -> None:
    s = Groups()
    for topic in ("a.x", "b.x"):
        await s.delivery.following.subscribe(Subscription("g", topic), "earliest")
    await s.send("b.x", "secret")
    permitted: set[str] = {"a.x"}
    waiting = asyncio.ensure_future(
        s.delivery.receive("g", Receive(instance="i", max=1, wait=30), lambda topic: topic in permitted)
    )
    await asyncio.sleep(0)  # the poll waits: the principal may not consume the message's topic
    await s.send("b.x", "secret too")
    await s.send("a.x", "open")
    assert [m.topic for h in await waiting for m in h.messages] == ["a.x"]
    receipts = await s.receive(instance="other")
    assert list(receipts.values()) == ["secret", "secret too"]
    assert await s.settle(receipts, may=lambda topic: topic in permitted) == [403, 403]
    assert await s.settle(receipts) == [200, 200]


async def test_a_request_to_receive_makes_no_topic_where_first_use_makes_none() -> None:
    s = Groups(on_first_use=False)
    with pytest.raises(UnknownTopic):
        await s.receive(topics=["mistyped"])
    with pytest.raises(NotifyError, match="number of topics"):
        await s.receive(topics=[f"t{n}" for n in range(1001)])
    assert s.store.topics() == []


async def test_a_renewal_keeps_the_topic_for_its_owner() -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", "failover"), "earliest")
    await s.send("t", "a", "b")
    held = await s.receive(limit=1, lease=5)
    items = [SettleItem(receipt=receipt, action="renew", lease=100.0) for receipt in held]
    assert [a.status for a in await s.delivery.settle("g", items)] == [200]
    s.now_us += 50 * SECOND
    await s.delivery.tick()
    assert await s.receive(instance="standby") == {}
    assert await s.settle(held) == [200]


async def test_a_topic_that_grows_keeps_the_order_of_each_key() -> None:
    """Growth may move a key to another queue: messages sent after it wait until those before it are settled."""
    s = Groups()
    s.topics.put_soon(Topic("t", queues=2))
    await s.delivery.following.subscribe(Subscription("g", "t", "ordered"), "earliest")
    keys = [f"k{n}" for n in range(12)]
    await s.send("t", *[f"{key}-0" for key in keys], keyed=True)
    held = await s.receive()
    s.topics.put_soon(Topic("t", queues=5))
    await s.send("t", *[f"{key}-1" for key in keys], keyed=True)
    s.topics.put_soon(Topic("t", queues=7))
    await s.send("t", *[f"{key}-2" for key in keys], keyed=True)
    assert await s.receive() == {}
    receipts = list(held)
    assert await s.settle(receipts[:-1]) == [200] * 11
    assert await s.receive() == {}
    assert await s.settle(receipts[-1:]) == [200]
    second = await s.receive()
    assert sorted(second.values()) == sorted(f"{key}-1" for key in keys)
    await s.settle(second)
    assert sorted((await s.receive()).values()) == sorted(f"{key}-2" for key in keys)


@pytest.mark.parametrize("mode", ["shared", "exclusive", "failover", "broadcast"])
async def test_first_deliveries_of_a_key_keep_its_order_where_the_topic_grows(mode: str) -> None:
    """Promise 7, in modes without acknowledgement order: a key's later messages wait until earlier ones are out."""
    s = Groups()
    s.topics.put_soon(Topic("t", queues=1))
    await s.delivery.following.subscribe(Subscription("g", "t", mode), "earliest")
    await s.receive()  # a broadcast instance begins now
    keys = [f"k{n}" for n in range(8)]
    await s.send("t", *[f"{key}-{n}" for n in range(100) for key in keys], keyed=True)
    s.topics.put_soon(Topic("t", queues=4))
    await s.send("t", *[f"{key}-{n}" for n in range(100, 106) for key in keys], keyed=True)
    handed: list[str] = []
    while got := await s.receive(limit=5):
        handed += got.values()
    assert len(handed) == 848
    for key in keys:
        assert [body for body in handed if body.startswith(f"{key}-")] == [f"{key}-{n}" for n in range(106)]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
async def test_a_poll_goes_on_behind_a_growth_whose_last_messages_nobody_wants(mode: str) -> None:
    """A tag leaves out all messages from before the growth: the waiting poll is woken nevertheless."""
    s = Groups()
    s.topics.put_soon(Topic("t", queues=1))
    await s.delivery.following.subscribe(Subscription("g", "t", mode, tags=("b",)), "earliest")
    payload = encode_msgpack(Payload("t", b"old", "k", "a"))
    old = NewMessage("t", payload, "k", "a")
    await s.store.put([NewTransaction(ids.new_id(), "", [old], committed=True)], s.now_us)
    s.topics.put_soon(Topic("t", queues=4))
    for key in "klmnop":
        new = NewMessage("t", encode_msgpack(Payload("t", key.encode(), key, "b")), key, "b")
        await s.store.put([NewTransaction(ids.new_id(), "", [new], committed=True)], s.now_us)
    assert sorted((await s.receive()).values()) == list("klmnop")


async def test_a_topic_does_not_grow_without_end() -> None:
    """A topic is refused more queues while too many growths still matter: forgetting one would break key order."""
    s = Groups()
    s.topics.put_soon(Topic("t", queues=1))
    await s.send("t", "first")
    for queues in range(2, MOST_GROWN + 2):
        s.topics.put_soon(Topic("t", queues=queues))
    with pytest.raises(InvalidRequest, match="in one step"):
        s.topics.put_soon(Topic("t", queues=200))
    s.store.trim("t", 0, 1)  # no message from before the growth is left
    s.topics.put_soon(Topic("t", queues=200))


@pytest.mark.parametrize("fair_by", ["", "key", "header:tenant"])
@pytest.mark.parametrize("options", [{"mode": "shared"}, {"mode": "ordered"}, {"tags": ("x",)}])
async def test_a_group_sleeps_after_all_that_waits_was_purged(options: dict[str, Any], fair_by: str) -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", fair_by=fair_by, **options), None)
    await s.send("t", "a-1", "a-2", "b-1", keyed=True)
    s.store.trim("t", 0, 3)
    for _ in range(2):
        assert await s.receive() == {}
    assert not s.group().has_skipped, "the waiting poll would be served again and again"
    assert s.store.progress("g", "t", 0).floor == 3


async def test_a_group_has_a_bound_of_instances_that_a_topic_is_broadcast_to() -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", "broadcast"), None)
    for number in range(MOST_BROADCAST_INSTANCES):
        await s.receive(instance=f"i{number}")
    with pytest.raises(Conflict, match="stays the same"):
        await s.receive(instance="one more")
    await s.receive(instance="i7")
    # A tick acts on instances that have something due, and costs nothing for the others.
    assert s.delivery.next_event_us() is None


async def test_instances_that_join_do_not_delay_forgetting_old_ones() -> None:
    """Forgetting an instance waits for the disk: meanwhile other instances join, and an administrator ends some."""
    s = Groups()
    for group in ("g", "h"):
        await s.delivery.following.subscribe(Subscription(group, "t", "broadcast"), None)
        for instance in ("a", "b"):
            await s.delivery.receive(group, Receive(instance=instance))
    await s.delivery.following.subscribe(Subscription("late", "t", "broadcast"), None)
    unsubscribe, joined = s.store.unsubscribe, []

    async def slowly(group: str, topic: str) -> None:
        await unsubscribe(group, topic)
        if not joined:
            joined.append(await s.delivery.receive("late", Receive(instance="c")))
            await s.delivery.following.unsubscribe("h", "t")

    s.store.unsubscribe = slowly  # type: ignore[method-assign]
    s.now_us += 2 * INSTANCE_IDLE_US
    await s.delivery.tick()
    assert joined == [[]]
    assert s.store.subscription("late@c", "t") is not None
    assert not [x for x in s.store.subscriptions() if x.group.startswith(("g@", "h"))]
    assert not [name for name in s.delivery.groups if name.startswith(("g@", "h@"))]
    assert s.delivery.followers.instances_of("g") == s.delivery.followers.instances_of("h") == []


async def test_an_instance_that_comes_back_while_it_is_forgotten_asks_again() -> None:
    """The waiting poll returns empty, so that the instance asks again. It waited at a group that was gone."""
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", "broadcast"), None)
    await s.receive(instance="a")
    unsubscribe, polls = s.store.unsubscribe, []

    async def slowly(group: str, topic: str) -> None:
        await unsubscribe(group, topic)
        poll = s.delivery.receive("g", Receive(instance="a", wait=60))
        polls.append(asyncio.ensure_future(poll))
        await asyncio.sleep(0)  # the poll waits now

    s.store.unsubscribe = slowly  # type: ignore[method-assign]
    s.now_us += 2 * INSTANCE_IDLE_US
    await s.delivery.tick()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await polls[0] == []
    await s.receive(instance="a")
    await s.send("t", "heard")
    assert list((await s.receive(instance="a")).values()) == ["heard"]


async def test_an_instance_that_subscribes_again_while_it_is_forgotten_stays() -> None:
    """It was forgotten with a subscription that it had made since: from then on each message of the topic failed."""
    s = Groups()
    for topic in ("t", "u"):
        await s.delivery.following.subscribe(Subscription("g", topic, "broadcast"), None)
    await s.receive(instance="a")
    unsubscribe, ended = s.store.unsubscribe, []

    async def slowly(group: str, topic: str) -> None:
        await unsubscribe(group, topic)
        if ended:
            await s.receive(instance="a", topics=ended)
        ended.append(topic)

    s.store.unsubscribe = slowly  # type: ignore[method-assign]
    s.now_us += 2 * INSTANCE_IDLE_US
    await s.delivery.tick()
    await s.send(ended[0], "heard")
    assert list((await s.receive(instance="a")).values()) == ["heard"]


async def test_nothing_of_a_deleted_topic_stays() -> None:
    s = Groups()
    for number in range(3):
        await s.delivery.following.subscribe(Subscription("g", f"t{number}"), None)
        await s.delivery.following.delete_topic(f"t{number}")
    assert not s.delivery.followers.by_topic


async def test_settling_costs_no_more_where_many_instances_are_broadcast_to() -> None:
    """A false receipt is not compared with every instance. One request of them held up the server for seconds."""
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", "broadcast"), None)
    for number in range(200):
        await s.receive(instance=f"i{number}")
    await s.send("t", "to all")
    (first,), (last,) = [await s.receive(instance=name) for name in ("i0", "i199")]
    false = [f"{number:0>1800x}.0" for number in range(LIMITS.items - 3)]
    before = time.thread_time()
    answers = await s.settle([first, "abc.0", *false, last])
    assert time.thread_time() - before < 1
    assert answers == [200, 410, *[422] * len(false), 200]
    assert await s.settle([first, last]) == [410, 410]


@pytest.mark.parametrize("mode", ["shared", "ordered", "failover"])
async def test_a_poll_that_ends_as_it_is_served_gives_its_messages_back(mode: str) -> None:
    """The next poll gets them at once. They stayed leased, held by nobody, until the lease ran out."""
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t", mode), "earliest")
    poll = asyncio.ensure_future(s.delivery.receive("g", Receive(instance="gone", max=10, wait=30)))
    await asyncio.sleep(0)  # the poll waits
    await s.send("t", "k-1", "k-2", keyed=True)
    assert s.group().in_flight() > 0
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
    assert s.group().in_flight() == 0
    handed = await s.delivery.receive("g", Receive(instance="gone", max=10))
    attempts = [attempt for h in handed for _, _, attempt in h.each()]
    assert attempts == ([1] if mode == "ordered" else [1, 1])
    await s.delivery.settle("g", [SettleItem(receipt=r, action="ack") for h in handed for r, _, _ in h.each()])
    if mode == "ordered":
        assert list((await s.receive(instance="gone")).values()) == ["k-2"]
    assert s.group().instances["gone"].in_flight <= 1


async def test_messages_of_a_poll_that_ended_go_to_who_waits() -> None:
    s = Groups()
    await s.delivery.following.subscribe(Subscription("g", "t"), "earliest")
    first, second = (
        asyncio.ensure_future(s.delivery.receive("g", Receive(instance=name, max=10, wait=30))) for name in "ab"
    )
    await asyncio.sleep(0)  # both polls wait
    await s.send("t", "x")
    first.cancel()
    assert [m.offset for h in await second for _, m, _ in h.each()] == [0]


# --- A group that catches up waits while producers are busy, and only then ------------------------------------------

BUSY = 20_000
"""Messages that keep a server busy for longer than a window."""


def test_a_group_is_paced_while_producers_are_busy_and_no_longer() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += BUSY
    pace.look(WINDOW_US)
    assert pace.share == LEAST_SHARE
    assert pace.is_busy
    assert pace.pause_us(0.001) > 0
    pace.look(2 * WINDOW_US)
    assert not pace.is_busy, "nothing was sent in the last window"
    assert pace.pause_us(0.001) == 0


def test_a_pile_that_was_stored_before_anyone_read_does_not_pace_its_reader() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += 100 * BUSY
    pace.look(STALE_US + 1)
    assert not pace.is_busy


def test_the_share_of_a_group_grows_slowly_while_producers_send_less() -> None:
    metrics = Metrics()
    pace = Pace(metrics, now_us=0)
    metrics.published += BUSY
    pace.look(WINDOW_US)
    metrics.published += 1
    pace.look(2 * WINDOW_US)
    assert pace.is_busy
    assert LEAST_SHARE < pace.share < 0.5
