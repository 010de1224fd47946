"""Fairness: classes share by weight, queues take turns, idle shares go to others, slow consumers get less."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, encode_msgpack
from notify.server.delivery.instances import ACTIVE_US, AT_LEAST, Instance, states
from notify.server.rate import TokenBucket
from notify.storage.groups import Priorities, PriorityClass, Subscription
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from tests.support.delivery import T0, Scene

CLASSES = Priorities(
    (PriorityClass("high", 6, ("high-*",)), PriorityClass("normal", 3), PriorityClass("low", 1, ("low-*",)))
)


class Groups(Scene):
    """A delivery, and the consumers of group `g`."""

    async def subscribe(self, *topics: str, group: str = "g", **fields: Any) -> None:
        for topic in topics:
            await self.delivery.following.subscribe(Subscription(group, topic, **fields), "earliest")

    async def fill(self, topic: str, count: int) -> None:
        payload = encode_msgpack(Payload(topic, b"x"))
        messages = [NewMessage(topic, payload)] * count
        await self.store.put([NewTransaction(ids.new_id(), "", messages, committed=True)], self.now_us)

    async def receive(self, count: int, *, instance: str = "i", ack: bool = True, lease: float = 30) -> list[str]:
        """The topic of each message that was handed out."""
        request = Receive(instance=instance, max=count, lease=lease)
        handed = await self.delivery.receive("g", request)
        if ack and handed:
            items = [SettleItem(receipt=f"{h.token}0-{len(h.messages) - 1}", action="ack") for h in handed]
            assert all(i.status == 200 for i in await self.delivery.settle("g", items))
        return [m.topic for h in handed for m in h.messages]


@pytest.mark.long
async def test_weights_hold_while_all_classes_have_work() -> None:
    s = Groups()
    topics = ["high-1", "high-2", "plain", "low-1"]
    await s.subscribe(*topics)
    await s.delivery.following.set_priorities("g", CLASSES)
    for topic in topics:
        await s.fill(topic, 20_000)
    for size in (100, 7, 1000):
        got = Counter(itertools.chain(*[await s.receive(size) for _ in range(10_000 // size)]))
        total = sum(got.values())
        for share, members in ((0.6, ["high-1", "high-2"]), (0.3, ["plain"]), (0.1, ["low-1"])):
            assert abs(sum(got[t] for t in members) / total - share) <= 0.05 * share + 256 / total
        assert abs(got["high-1"] - got["high-2"]) <= 256


async def test_an_idle_class_gives_its_share_to_the_others_and_saves_none_up() -> None:
    s = Groups()
    await s.subscribe("high-1", "plain", "low-1")
    await s.delivery.following.set_priorities("g", CLASSES)
    await s.fill("plain", 20_000)
    await s.fill("low-1", 20_000)
    got = Counter(itertools.chain(*[await s.receive(100) for _ in range(80)]))
    assert abs(got["plain"] / got["low-1"] - 3) < 0.3
    # Once it has work again, the class gets its weight from now on, not the turns that it missed.
    await s.fill("high-1", 20_000)
    got = Counter(itertools.chain(*[await s.receive(100) for _ in range(100)]))
    assert 5_500 < got["high-1"] < 6_500


@pytest.mark.long
async def test_a_thousand_topics_of_a_class_take_turns() -> None:
    s = Groups()
    topics = [f"t-{n}" for n in range(1000)]
    await s.subscribe(*topics)
    for topic in topics:
        await s.fill(topic, 120)
    got: Counter[str] = Counter()
    while sum(got.values()) < 80_000:
        got.update(await s.receive(500))
    mean = sum(got.values()) / 1000
    assert all(abs(got[t] - mean) <= 0.1 * mean + 8 for t in topics)


async def test_a_share_is_more_turns_and_changes_while_it_runs() -> None:
    s = Groups()
    await s.subscribe("a", "b")
    await s.fill("a", 60_000)
    await s.fill("b", 60_000)
    await s.delivery.following.set_priorities("g", Priorities((PriorityClass("one", 1),), {"a": 3}))
    got = Counter(itertools.chain(*[await s.receive(256) for _ in range(80)]))
    assert abs(got["a"] / got["b"] - 3) < 0.3
    await s.delivery.following.set_priorities("g", Priorities((PriorityClass("one", 1),), {"b": 4}))
    got = Counter(itertools.chain(*[await s.receive(256) for _ in range(100)]))
    assert abs(got["b"] / got["a"] - 4) < 0.5


async def test_waiting_acks_share_each_request() -> None:
    s = Groups()
    await s.subscribe("small", "large")
    await s.fill("large", 10_000)
    await s.fill("small", 40)
    assert Counter(await s.receive(80)) == {"large": 40, "small": 40}
    await s.fill("small", 1000)
    got = Counter(await s.receive(300))
    assert abs(got["large"] - got["small"]) <= 1
    # So do classes, by their weight.
    two = Priorities((PriorityClass("high", 3, ("small",)), PriorityClass("low", 1)))
    await s.delivery.following.set_priorities("g", two)
    assert Counter(await s.receive(200)) == {"small": 150, "large": 50}


async def test_queues_without_messages_are_not_visited() -> None:
    s = Groups()
    await s.subscribe(*[f"t-{n}" for n in range(500)])
    assert await s.receive(10) == []
    group = s.delivery.groups["g"]
    assert group.turns.awake() == 0
    await s.fill("t-77", 3)
    assert group.turns.awake() == 1
    assert await s.receive(10) == ["t-77"] * 3


async def test_topics_of_a_pattern_are_followed_when_they_are_made() -> None:
    s = Groups()
    await s.store.create_topic(Topic("task.1"))
    await s.fill("task.1", 2)
    assert await s.delivery.following.subscribe_pattern(Subscription("g", "task.*"), None) == ["task.1"]
    assert await s.receive(10) == []  # the topic exists: the group begins at its end
    s.topics.put_soon(Topic("task.2"))
    await s.fill("task.2", 2)
    assert await s.receive(10) == ["task.2", "task.2"]


# --- consumers ------------------------------------------------------------------------------------------------


async def test_a_stuck_consumer_gets_less_and_is_seen() -> None:
    s = Groups()
    await s.subscribe("t")
    await s.fill("t", 10_000)
    assert len(await s.receive(100, instance="stuck", ack=False, lease=1)) == 100
    for expected in (AT_LEAST, 2 * AT_LEAST, 100):
        assert len(await s.receive(100, instance="good")) == expected
    for expected in (AT_LEAST, 16, 8):
        s.now_us += 1_100_000
        await s.delivery.tick()
        assert states(s.delivery.groups["g"].instances, s.now_us)["stuck"] == "stuck"
        assert len(await s.receive(100, instance="stuck", ack=False, lease=1)) == expected
        assert len(await s.receive(100, instance="good")) == 100
    assert states(s.delivery.groups["g"].instances, s.now_us)["good"] == "ok"
    # The consumer recovers: each message that it finishes widens its bound again.
    s.now_us += 1_100_000
    await s.delivery.tick()
    for _ in range(20):
        await s.receive(100, instance="stuck", lease=30)
    assert len(await s.receive(100, instance="stuck")) == 100
    assert states(s.delivery.groups["g"].instances, s.now_us)["stuck"] == "ok"


async def test_many_leases_that_run_out_at_once_count_once_and_renewed_ones_not_at_all() -> None:
    s = Groups()
    await s.subscribe(*[f"t-{n}" for n in range(8)])
    for n in range(8):
        await s.fill(f"t-{n}", 10)
    assert len(await s.receive(80, instance="i", ack=False, lease=1)) == 80
    instance = s.delivery.groups["g"].instances["i"]
    for lease in list(s.delivery.groups["g"].leases.values()):
        renew = SettleItem(receipt=f"{lease.id:x}.0-{len(lease.offsets) - 1}", action="renew", lease=2)
        await s.delivery.settle("g", [renew])
    s.now_us += 1_500_000
    await s.delivery.tick()
    assert (instance.bound, instance.expired) == (None, 0)
    s.now_us += 1_500_000
    await s.delivery.tick()
    assert (instance.expired, instance.in_flight) == (80, 0)
    assert {topic: bound.most for topic, bound in instance.bounds.items()} == {f"t-{n}": 5 for n in range(8)}


async def test_a_bound_shrinks_by_the_share_that_ran_out_and_is_of_one_topic() -> None:
    s = Groups()
    await s.subscribe("bad", "good")
    await s.fill("bad", 1000)
    await s.receive(1000)  # it is known to be fast
    await s.fill("bad", 1000)
    for number in range(10):
        assert len(await s.receive(10, ack=False, lease=1 if number == 0 else 3600)) == 10
    s.now_us += 1_100_000
    await s.delivery.tick()
    instance = s.delivery.groups["g"].instances["i"]
    assert (instance.bounds["bad"].most, instance.in_flight) == (95, 90)
    await s.receive(1, instance="other")
    await s.fill("good", 500)
    assert Counter(await s.receive(200, ack=False)) == {"good": 195, "bad": 5}
    # The bound of the topic is reached: of that it gets one at a time, of the others all.
    assert Counter(await s.receive(100, ack=False)) == {"good": 99, "bad": 1}
    held = instance.bounds["bad"].in_flight
    assert held == sum(len(lease.open) for lease in s.delivery.groups["g"].leases.values()
                       if lease.cursor.topic == "bad" and lease.instance is instance)  # fmt: skip


async def test_a_new_consumer_beside_others_gets_little_until_it_has_finished_something() -> None:
    s = Groups()
    await s.subscribe("t")
    await s.fill("t", 60_000)
    await s.receive(1, instance="fast")
    assert len(await s.receive(1000, instance="new", ack=False)) == AT_LEAST
    assert await s.receive(1000, instance="new") == []
    assert len(await s.receive(1000, instance="quick")) == AT_LEAST
    got = [len(await s.receive(1000, instance="quick")) for _ in range(6)]
    assert got == [2 * AT_LEAST, 4 * AT_LEAST, 8 * AT_LEAST, 16 * AT_LEAST, 1000, 1000]


async def test_a_takeover_at_the_last_death_moves_to_the_dead_letters() -> None:
    s = Groups()
    await s.subscribe("t", mode="failover", max_deaths=1)
    await s.fill("t", 3)
    assert len(await s.receive(10, instance="a", ack=False, lease=1)) == 3
    s.now_us += 1_100_000
    assert await s.receive(10, instance="b") == []  # another instance takes over before the timer task has acted
    await s.delivery.tick()
    assert s.store.bounds("dead-letter.g", 0) == (0, 3)
    assert s.delivery.followers.lag("t") == 0


async def test_a_slow_consumer_has_no_more_than_it_finishes_in_a_while() -> None:
    s = Groups()
    await s.subscribe("t")
    await s.fill("t", 60_000)
    await s.receive(1, instance="fast")
    held: list[str] = []
    for _ in range(20):
        # The consumer finishes ten a second, and asks for a thousand.
        request = Receive(instance="slow", max=1000, lease=600)
        for h in await s.delivery.receive("g", request):
            held += [f"{h.token}{i}" for i in range(len(h.messages))]
        done, held = held[:10], held[10:]
        await s.delivery.settle("g", [SettleItem(receipt=r, action="ack") for r in done])
        for _ in range(4):
            await s.receive(500, instance="fast")
        s.now_us += 1_000_000
    slow = s.delivery.groups["g"].instances["slow"]
    assert slow.per_second is not None and 5 < slow.per_second < 15
    assert slow.room(1000) == 0
    assert states(s.delivery.groups["g"].instances, s.now_us)["slow"] == "slow"
    # Once the other has gone, nobody else could have what is kept from it.
    await s.fill("t", 2_000)
    s.now_us += ACTIVE_US
    assert len(await s.receive(1000, instance="slow")) == 1000


def test_an_instance_forgets_idle_time() -> None:
    i = Instance("i", T0)
    for begin in (100_000_000, 300_000_000):
        i.handed("t", 5, T0 + begin)
        i.finish("t", 5, T0 + begin + 500_000)
    assert i.per_second == 10


def test_a_bucket_holds_a_second_and_fills_steadily() -> None:
    bucket = TokenBucket(10, T0)
    bucket.take(10, T0)
    assert bucket.available(T0) == 0
    assert T0 + 90_000 < bucket.refilled_us(T0) < T0 + 110_000
    assert bucket.available(T0 + 550_000) == 5
    assert bucket.available(T0 + 60_000_000) == 10
    slow = TokenBucket(0.5, T0)
    assert slow.available(T0) == 1
    slow.take(1, T0)
    assert slow.available(T0 + 1_900_000) == 0
    assert slow.available(T0 + 2_000_001) == 1


async def test_a_groups_rate_holds() -> None:
    s = Groups()
    await s.subscribe("t")
    await s.fill("t", 1000)
    s.delivery.set_rates({"g": 50})
    assert len(await s.receive(100)) == 50
    assert await s.receive(100) == []
    s.now_us += 500_000
    assert len(await s.receive(100)) == 25
    s.delivery.set_rates({})
    assert len(await s.receive(100)) == 100
