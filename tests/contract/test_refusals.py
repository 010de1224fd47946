"""A storage refuses appends at random: every message is settled, and none twice."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from notify.errors import DiskFull, NotifyError, StorageFailed, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Payload, Receive, SettleItem, encode_msgpack
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.groups import SettleKind, Subscription
from notify.storage.names import DEAD_LETTER_PREFIX
from notify.storage.records import NewMessage, NewTransaction
from notify.storage.topics import Topic
from tests.contract.stores import SECOND, T0, Bench

MESSAGES = 40
REFUSALS = (
    DiskFull("the server's disk is full"),
    Unavailable("the disk cannot keep up"),
    StorageFailed("the disk failed"),
)
REFUSED = (Unavailable, StorageFailed)
APPENDS = ("settle_soon", "attempted", "dead_letter_soon", "subscribe_soon", "create_topic_soon", "pause")


class Refusing:
    """A store in front of another: an append is refused at random while it `refuses`."""

    def __init__(self, store: Any, chance: random.Random) -> None:
        self._store = store
        self._chance = chance
        self.share = 0.3
        """The share of appends that are refused."""
        self.refuses = False
        self.refused: set[str] = set()
        self.acked: dict[int, int] = {}
        """How often each offset was settled as acknowledged."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in APPENDS:
            return method

        def append(*arguments: Any) -> Any:
            if self.refuses and self._chance.random() < self.share:
                self.refused.add(name)
                raise self._chance.choice(REFUSALS)
            if name == "settle_soon" and arguments[4] is SettleKind.ACK:
                for first, count in arguments[3]:
                    for offset in range(first, first + count):
                        self.acked[offset] = self.acked.get(offset, 0) + 1
            return method(*arguments)

        return append


class Consumers:
    """Two instances that acknowledge, refuse, renew and forget what they are given."""

    def __init__(self, delivery: Delivery, chance: random.Random) -> None:
        self._delivery = delivery
        self._chance = chance
        self._held: list[str] = []

    async def act(self) -> None:
        """Make one request, which may be refused."""
        instance = self._chance.choice("ab")
        try:
            if self._held and self._chance.random() < 0.6:
                receipts = self._chance.sample(self._held, min(len(self._held), 4))
                actions = ("ack", "ack", "retry", "dead_letter", "renew")
                items = [
                    SettleItem(receipt=receipt, action=self._chance.choice(actions), lease=5.0, delay=1.0)
                    for receipt in receipts
                ]
                answers = await self._delivery.settle("g", items)
                gone = {a.receipt for a in answers if a.status == 410}
                self._held = [receipt for receipt in self._held if receipt not in gone]
            else:
                handed = await self._delivery.receive("g", Receive(instance=instance, max=5, lease=3.0))
                self._held += [receipt for h in handed for receipt, _, _ in h.each()]
        except REFUSED:
            return  # the refused request changed nothing

    async def finish(self) -> None:
        """Receive and acknowledge until no message comes."""
        for instance in "ab":
            handed = await self._delivery.receive("g", Receive(instance=instance, max=100, lease=3.0))
            items = [SettleItem(receipt=receipt, action="ack") for h in handed for receipt, _, _ in h.each()]
            if items:
                await self._delivery.settle("g", items)


def _sent(number: int) -> NewTransaction:
    key, tag = str(number % 3), "ab"[number % 2]
    payload = encode_msgpack(Payload("t", b"%d" % number, key, tag, {"n": str(number)}))
    ttl_us = 30 * SECOND if number % 10 == 9 else 0
    message = NewMessage("t", payload, key, tag, ttl_us=ttl_us)
    return NewTransaction(ids.new_id(), "", [message], committed=True)


@pytest.mark.parametrize("mode", ["shared", "ordered", "failover"])
@pytest.mark.parametrize(
    "wanted", [{}, {"tags": ("a",)}, {"filter": 'headers.n != "7"'}], ids=["all", "tags", "filter"]
)
def test_no_message_is_lost_track_of(run: Callable[..., None], mode: str, wanted: dict[str, Any]) -> None:
    refused: set[str] = set()

    async def scenario(b: Bench) -> None:
        for seed in range(3):
            chance = random.Random(seed)
            now_us = [T0]
            store: Any = Refusing(b.store, chance)
            if b.store.has_topic("t"):
                await b.store.delete_topic("t")
            await b.store.create_topic(Topic("t"))
            delivery = Delivery(store, lambda now_us=now_us: now_us[0], Metrics(), Topics(store))
            subscription = Subscription("g", "t", mode, max_attempts=3, max_deaths=3, retry_min_us=SECOND, **wanted)
            await delivery.following.subscribe(subscription, "earliest")
            await b.store.put([_sent(number) for number in range(MESSAGES)], T0)
            end = b.store.bounds("t", 0)[1]
            consumers = Consumers(delivery, chance)
            store.refuses = True
            for _ in range(120):
                await consumers.act()
                now_us[0] += chance.choice((0, SECOND // 2, 2 * SECOND))
                with contextlib.suppress(*REFUSED):
                    await delivery.tick()
            store.refuses = False
            refused.update(store.refused)
            for _ in range(60):
                now_us[0] += 20 * SECOND
                await delivery.tick()
                await consumers.finish()
            group = delivery.groups["g"]
            assert group.in_flight() == 0
            assert [(c.lag(), c.progress.floor) for c in group.cursors.values()] == [(0, end)], f"seed {seed}"
            assert all(count == 1 for count in store.acked.values()), f"seed {seed}: {store.acked}"
            letters = b.store.read(DEAD_LETTER_PREFIX + "g", 0, 0, 1000, 1 << 20)
            names = [(m.transaction_id, m.message_no) for m in letters]
            assert len(set(names)) == len(names), f"seed {seed}: two dead letters of one message"

    run(scenario)
    assert {"settle_soon", "attempted", "dead_letter_soon"} <= refused


def test_a_full_disk_loses_no_lease(run: Callable[..., None]) -> None:
    """Acks, dead letters, last attempts and expired leases on a full disk take effect once there is room."""

    async def scenario(b: Bench) -> None:
        now_us = [T0]
        store: Any = Refusing(b.store, random.Random(1))
        store.share = 1.0
        delivery = Delivery(store, lambda: now_us[0], Metrics(), Topics(store))
        await delivery.following.subscribe(Subscription("g", "t", max_attempts=1, max_deaths=1), "earliest")
        await b.store.put([_sent(number) for number in range(4)], T0)
        handed = await delivery.receive("g", Receive(instance="a", max=10, lease=30))
        receipts = [receipt for h in handed for receipt, _, _ in h.each()]
        actions = ("ack", "dead_letter", "retry")
        items = [SettleItem(receipt=r, action=a) for r, a in zip(receipts, actions, strict=False)]
        store.refuses = True
        with pytest.raises(NotifyError):
            await delivery.settle("g", items)
        now_us[0] += 31 * SECOND
        with contextlib.suppress(*REFUSED):
            await delivery.tick()
        assert delivery.groups["g"].in_flight() == 4
        store.refuses = False
        assert [a.status for a in await delivery.settle("g", items)] == [200, 200, 200]
        now_us[0] += SECOND
        await delivery.tick()
        assert delivery.groups["g"].in_flight() == 0
        assert delivery.groups["g"].lag() == 0
        await b.store.sync()
        assert len(b.store.read(DEAD_LETTER_PREFIX + "g", 0, 0, 10, 1 << 20)) == 3

    run(scenario)


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_that_is_refused_changes_nothing(run: Callable[..., None], paused: bool) -> None:
    """Until the next restart a group was paused, or continued, although the request had failed."""

    async def scenario(b: Bench) -> None:
        store: Any = Refusing(b.store, random.Random(1))
        store.share = 1.0
        delivery = Delivery(store, lambda: T0, Metrics(), Topics(store))
        await delivery.following.subscribe(Subscription("g", "t"), "earliest")
        await delivery.pause("g", not paused)
        store.refuses = True
        with pytest.raises(NotifyError):
            await delivery.pause("g", paused)
        assert delivery.is_paused("g") is not paused
        store.refuses = False
        await delivery.pause("g", paused)
        assert delivery.is_paused("g") is paused

    run(scenario)


def test_a_topic_and_the_groups_whose_pattern_it_meets_are_stored_together(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the disk refuses before a restart, topic and subscription are both stored, or neither is."""

    async def scenario(b: Bench) -> None:
        topics = Topics(b.store)
        delivery = Delivery(b.store, lambda: T0, Metrics(), topics)
        await delivery.following.subscribe_pattern(Subscription("g", "made.*"), None)
        for refused_call in (1, 2):
            with monkeypatch.context() as patched, contextlib.suppress(DiskFull):
                if b.kind != "memory":
                    patched.setattr(b.store.journal, "reserve", _refusing(b.store.journal.reserve, refused_call))
                topics.put_soon(Topic("made.last"))
            await b.restart()
            assert b.store.has_topic("made.last") == (b.store.subscription("g", "made.last") is not None)
            topics = Topics(b.store)
            delivery = Delivery(b.store, lambda: T0, Metrics(), topics)
        assert b.store.has_topic("made.last")
        await b.store.put([_to("made.last")], T0)
        handed = await delivery.receive("g", Receive(instance="a", max=10, lease=30))
        assert [m.topic for h in handed for _, m, _ in h.each()] == ["made.last"]

    run(scenario)


def test_a_pattern_does_not_follow_again_what_its_group_has_left(run: Callable[..., None]) -> None:
    """No restart and no change of the topic subscribes the group again; a new subscription to the pattern does."""

    async def scenario(b: Bench) -> None:
        topics = Topics(b.store)
        delivery = Delivery(b.store, lambda: T0, Metrics(), topics)
        await delivery.following.subscribe_pattern(Subscription("g", "made.*"), None)
        topics.put_soon(Topic("made.empty"))
        await delivery.following.unsubscribe("g", "made.empty")
        topics.put_soon(Topic("made.empty", queues=2))
        assert b.store.subscription("g", "made.empty") is None
        await b.restart()
        delivery = Delivery(b.store, lambda: T0, Metrics(), Topics(b.store))
        await delivery.tick()
        assert b.store.subscription("g", "made.empty") is None
        await delivery.following.subscribe_pattern(Subscription("g", "made.*"), None)
        assert b.store.subscription("g", "made.empty") is not None

    run(scenario)


def _refusing(reserve: Callable[[int], None], refused_call: int) -> Callable[[int], None]:
    """`reserve`, but its call number `refused_call` raises DiskFull."""
    calls = itertools.count(1)

    def call(size: int) -> None:
        if next(calls) == refused_call:
            raise DiskFull("the server's disk is full")
        reserve(size)

    return call


def _to(topic: str) -> NewTransaction:
    message = NewMessage(topic, encode_msgpack(Payload(topic, b"x")))
    return NewTransaction(ids.new_id(), "", [message], committed=True)
