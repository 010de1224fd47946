"""The server's clock: nothing stands still, or ends early, because somebody sets the time of day."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notify.protocol.wire import JsonMessages, JsonPublished, Receive, SettleItem, Subscribe
from notify.runtime.clock import SteadyClock, wall_clock
from notify.server.access.principal import EVERYONE
from notify.server.app import App
from notify.server.core.core import Core
from notify.server.rate import TokenBucket
from notify.server.settings import Settings
from notify.storage.log.store import LogStore
from notify.storage.memory import MemoryStore
from notify.storage.topics import Topic
from tests.support.transactions import sent

SECOND_US = 1_000_000
HOURS_US = 2 * 3600 * SECOND_US
NOW_US = 1_800_000_000 * SECOND_US


class Times:
    """The time of day, which somebody sets, and one that nobody sets."""

    def __init__(self) -> None:
        self.wall_us, self.steady_us = NOW_US, 5
        self.clock = SteadyClock(lambda: self.wall_us, lambda: 1000 * self.steady_us)

    def pass_by(self, us: int) -> int:
        self.wall_us += us
        self.steady_us += us
        return self.clock()


def test_a_clock_that_is_set_back_goes_on_at_half_its_speed() -> None:
    times = Times()
    assert times.clock() == NOW_US
    assert times.pass_by(SECOND_US) == NOW_US + SECOND_US
    times.wall_us -= HOURS_US
    assert times.clock() == NOW_US + SECOND_US
    assert times.pass_by(10 * SECOND_US) == NOW_US + 6 * SECOND_US
    assert [times.pass_by(1) for _ in range(4)][-1] == NOW_US + 6 * SECOND_US + 2, "however often it is asked"
    before = times.clock()
    seen = [times.pass_by(HOURS_US // 7) for _ in range(20)]
    assert seen == sorted(seen) and seen[0] > before
    assert times.clock() == times.wall_us, "it was caught up with"


def test_a_clock_that_is_set_ahead_is_followed() -> None:
    times = Times()
    times.clock()
    times.wall_us += HOURS_US
    assert times.clock() == NOW_US + HOURS_US
    assert times.pass_by(SECOND_US) == NOW_US + HOURS_US + SECOND_US


def test_a_clock_that_was_years_ahead_is_given_up() -> None:
    """A machine that starts with any time: what is due at an instant would be early for years."""
    times = Times()
    times.clock()
    times.wall_us -= 400 * 12 * HOURS_US
    assert times.clock() == times.wall_us
    assert times.pass_by(SECOND_US) == times.wall_us
    bucket = TokenBucket(10, NOW_US)
    bucket.take(10, NOW_US)
    assert bucket.available(times.clock()) == 0 and bucket.available(times.pass_by(SECOND_US)) == 10


def test_a_rate_goes_on_when_the_clock_is_set_back() -> None:
    """A bucket did not fill for as long as the clock was behind: whoever has a rate was refused for hours."""
    times = Times()
    bucket = TokenBucket(10, times.clock())
    bucket.take(10, times.clock())
    times.wall_us -= HOURS_US
    assert bucket.available(times.clock()) == 0
    assert bucket.available(times.pass_by(SECOND_US)) == 5


@pytest.mark.parametrize("mode", ["shared", "failover"])
async def test_leases_last_while_the_server_is_away(tmp_path: Path, mode: str) -> None:
    """A process that was stopped, or whose clock was set ahead, heard nobody renew or settle: each message in hand had
    used up an attempt, and with one attempt it was dead although its consumer had done it."""
    ahead_us = 0
    clock = SteadyClock(lambda: wall_clock() + ahead_us)
    core = Core(MemoryStore(), Settings(data_dir=str(tmp_path)), clock)
    running = asyncio.ensure_future(core.run())
    try:
        await core.act()  # it has begun
        subscriptions = core.subscriptions
        asked = Subscribe(mode=mode, start="latest", max_attempts=1)
        await subscriptions.put(subscriptions.checked("g", "t", asked), asked.start)
        published = JsonMessages([JsonPublished(topic="t", body="a"), JsonPublished(topic="t", body="b")])
        await core.transactions.publish(published, EVERYONE)
        (handed,) = await core.delivery.receive("g", Receive(instance="x", max=2, lease=3600))
        first, second = (receipt for receipt, _, _ in handed.each())
        for _ in range(3):
            ahead_us += HOURS_US
            await core.act()
        (settled,) = await core.delivery.settle("g", [SettleItem(first, "ack")])
        assert settled.status == 200, settled.detail
        assert await core.delivery.receive("g", Receive(instance="y")) == []
        (settled,) = await core.delivery.settle("g", [SettleItem(second, "ack")])
        assert settled.status == 200, settled.detail
    finally:
        running.cancel()


async def test_a_server_that_restarts_continues_from_the_time_of_its_log(tmp_path: Path) -> None:
    """A machine began with a wrong time, and the server was started again once it was right: retries, delays and checks
    of the time between waited as many hours as the clock had been ahead."""
    times = Times()
    settings = Settings(data_dir=str(tmp_path))

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[Core]:
        times.clock = SteadyClock(lambda: times.wall_us, lambda: 1000 * times.steady_us)
        app = App(settings, lambda: LogStore(tmp_path / "log", clock=times.clock), times.clock)
        await app.start()
        try:
            yield app.running().core
        finally:
            await app.stop()

    async def received(core: Core) -> int:
        await core.act()
        return sum(
            1 for handed in await core.delivery.receive("g", Receive(instance="x", max=9)) for _ in handed.each()
        )

    times.wall_us = NOW_US + HOURS_US
    async with started() as core:
        asked = Subscribe(start="latest")
        await core.subscriptions.put(core.subscriptions.checked("g", "t", asked), asked.start)
        published = JsonMessages([JsonPublished(topic="t", body="a", delay=2.0), JsonPublished(topic="t", body="b")])
        await core.transactions.publish(published, EVERYONE)
        (handed,) = await core.delivery.receive("g", Receive(instance="x", max=9))
        (receipt,) = (receipt for receipt, _, _ in handed.each())
        await core.delivery.settle("g", [SettleItem(receipt, "retry", delay=1.0)])
    times.wall_us = NOW_US
    async with started() as core:
        times.pass_by(5 * SECOND_US)
        assert await received(core) + await received(core) == 2, "each answer has the messages of one queue"


async def test_a_check_never_waits_for_longer_than_a_check_may(tmp_path: Path) -> None:
    """With a clock that had been ahead by more than a day, a new start waited until that time came: no restart helped,
    although the server's log asked for one."""
    for ahead_us in (15 * HOURS_US, 0):
        store = LogStore(tmp_path / "log", clock=lambda: NOW_US)
        await store.open(NOW_US)
        if ahead_us:
            await store.create_topic(Topic("t"))
            await store.put([sent(check_after_us=SECOND_US)], NOW_US + ahead_us)
            assert store.next_check_us("g") == NOW_US + ahead_us + SECOND_US
        else:
            assert store.next_check_us("g") == NOW_US
        await store.close()


def test_a_log_from_days_ahead_is_not_followed() -> None:
    times = Times()
    times.clock.go_on_from(NOW_US + 30 * HOURS_US)
    assert times.clock() == NOW_US
    times.clock.go_on_from(NOW_US - HOURS_US)
    assert times.clock() == NOW_US
    times.clock.go_on_from(NOW_US + HOURS_US)
    assert times.pass_by(10 * SECOND_US) == NOW_US + HOURS_US + 5 * SECOND_US
