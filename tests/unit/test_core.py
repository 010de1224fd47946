"""A step of the core's timer task that fails, or has much to do, ends neither the task nor its other steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from notify.protocol.wire import PackedMessage, PackedMessages, PackedPublished, PackedTransaction, PackedTransactions
from notify.server.core.core import Core
from notify.server.core.flow import RateLimits
from notify.server.delivery import delivery
from notify.server.settings import Settings
from notify.storage.groups import Subscription
from notify.storage.log import LogStore
from notify.storage.memory import MemoryStore
from notify.storage.topics import Backlog, Topic
from tests.support.clock import eventually_async
from tests.support.transactions import new_id, sent

NOW_US = 1_800_000_000_000_000


async def test_a_step_that_fails_holds_up_none_of_the_others(tmp_path: Path) -> None:
    now_us = NOW_US
    core = Core(MemoryStore(), Settings(data_dir=str(tmp_path)), lambda: now_us)
    delivered: list[int] = []
    healthy = False

    async def forget() -> None:
        if not healthy:
            raise RuntimeError("dictionary changed size during iteration")

    async def deliver() -> None:
        delivered.append(now_us)

    core._steps = (forget, deliver)
    running = asyncio.ensure_future(core.run())
    try:
        await eventually_async(lambda: len(delivered) > 2, "the second step to be done again")
        now_us += 1
        await core.act()
        # Probes see the time of the last round without a fault: it stands still while a step fails.
        assert core.faults > 2 and core.ticked_us == NOW_US
        healthy = True
        await core.act()
        assert core.ticked_us == now_us
    finally:
        running.cancel()


async def test_many_messages_that_are_due_at_once_hold_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases and checks waited until all were released. Of 2 million with one `deliver_at` that took longer than a
    probe of health waits for the next round."""
    monkeypatch.setattr(delivery, "RELEASE_BATCH", 1)
    monkeypatch.setattr(delivery, "RELEASE_SECONDS", 0, raising=False)
    now_us = NOW_US
    store = MemoryStore()
    await store.open(NOW_US)
    await store.create_topic(Topic("t"))
    delayed = [sent(committed=True, delay_us=1_000_000) for _ in range(20)]
    await store.put(delayed, NOW_US)
    core = Core(store, Settings(data_dir=str(tmp_path)), lambda: now_us)
    released: list[int] = []

    async def ask() -> None:
        released.append(store.bounds("t", 0)[1])

    core._steps = (*core._steps[:2], ask)
    now_us += 1_000_000
    running = asyncio.ensure_future(core.run())
    try:
        await core.act()  # returns when all is done
        assert store.bounds("t", 0)[1] == len(delayed)
        assert released[0] < 3 and released == sorted(released) and core.ticked_us == now_us
    finally:
        running.cancel()


async def test_a_topic_that_is_deleted_leaves_no_bound_behind(tmp_path: Path) -> None:
    """While its deletion waited for the disk, trimming its backlog failed, and the rate of a topic of the same name
    that was made meanwhile was dropped with it."""
    store = MemoryStore()
    await store.open(NOW_US)
    core = Core(store, Settings(data_dir=str(tmp_path)), lambda: NOW_US)
    core.flow.set_limits(RateLimits(topics={"t": 5.0}))
    core.topics.put_soon(Topic("t", backlog=1, backlog_policy=Backlog.DROP_OLDEST))
    sync = store.sync

    async def slowly() -> None:
        core.flow.drop_oldest()
        core.topics.use("t")
        await sync()

    store.sync = slowly  # type: ignore[method-assign]
    await core.delete_topic("t")
    gate = core.flow.gates["t"]
    assert gate.bucket is not None and gate.bucket.per_second == 5.0 and not gate.topic.backlog


@pytest.mark.parametrize("kind", ["halves", "messages"])
async def test_a_topic_that_is_deleted_while_another_message_waits_refuses_its_own_message_only(
    tmp_path: Path, kind: str
) -> None:
    """The whole request failed with a fault of the server."""
    now_us = NOW_US
    store = LogStore(tmp_path)
    await store.open(NOW_US)
    core = Core(store, Settings(data_dir=str(tmp_path)), lambda: now_us)
    core.topics.put_soon(Topic("full", backlog=1, backlog_policy=Backlog.HOLD))
    await core.delivery.following.subscribe(Subscription("g", "full"), None)
    await core.transactions.publish(PackedMessages([PackedPublished(topic="full", body=b"first")]))
    names = ("gone", "full")
    if kind == "halves":
        halves = [PackedTransaction(id=new_id(), messages=[PackedMessage(topic=name, body=b"x")]) for name in names]
        sending = core.transactions.put(PackedTransactions(producer_group="p", transactions=halves))
    else:
        sending = core.transactions.publish(PackedMessages([PackedPublished(topic=n, body=b"x") for n in names]))
    waiting = asyncio.ensure_future(sending)
    await eventually_async(lambda: core.flow.waits > 0, "the message to wait for room")
    await core.delete_topic("gone")
    core.queues.trim("full", 0, 1)
    now_us += 10_000
    assert [(item.status, item.code) for item in await waiting] == [(503, "unavailable"), (201, None)]
    await store.close()
