"""Leases are renewed while their handlers run; a loop that was blocked for longer than a lease is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from notify.client.consumer.session import LOG_SECONDS, Renewals
from tests.support.virtual_loop import VirtualLoop

LEASE = 30.0


def test_a_loop_that_stood_still_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualLoop()
    renewed: list[str] = []

    async def scenario() -> None:
        renewals = Renewals[str](LEASE, renewed.append)
        for blocked, logged in ((LEASE / 2, 0), (1.1 * LEASE, 1), (LEASE, 1), (LEASE + LOG_SECONDS, 2)):
            renewals.begin("r")
            loop.now += blocked
            renewals.look("r")
            renewals.end("r")
            assert len(caplog.messages) == logged, blocked
        renewals.begin("slow")
        await asyncio.sleep(0.9 * LEASE)  # on the virtual clock
        assert renewed == ["slow"] * 2 and len(caplog.messages) == 2
        loop.now += LOG_SECONDS
        await asyncio.sleep(0.01)  # on the virtual clock
        renewals.end("slow")
        assert len(renewed) == 3 and len(caplog.messages) == 3

    with caplog.at_level(logging.WARNING, "notify.consumer"):
        loop.run_until_complete(scenario())
    loop.close()
    assert "blocked for more than 23.0 s" in caplog.messages[0] and "Consumer" in caplog.messages[0]


def test_leases_that_are_due_soon_are_renewed_together() -> None:
    loop = VirtualLoop()
    renewed: list[tuple[str, float]] = []

    async def scenario() -> None:
        began = loop.time()
        renewals = Renewals[str](LEASE, lambda held: renewed.append((held, loop.time() - began)))
        renewals.begin("a")
        await asyncio.sleep(4)  # on the virtual clock
        renewals.begin("b")
        renewals.begin("ended")
        renewals.end("ended")
        await asyncio.sleep(3)  # on the virtual clock
        renewals.begin("c")
        await asyncio.sleep(14)  # on the virtual clock
        renewals.close()
        await asyncio.sleep(LEASE)  # on the virtual clock

    loop.run_until_complete(scenario())
    loop.close()
    assert [(held, round(at)) for held, at in renewed] == [("a", 10), ("b", 10), ("c", 17), ("a", 17), ("b", 17)]


def test_an_answer_is_as_old_as_a_standstill_that_came_after_its_request() -> None:
    """It may have lain there all the time, and its lease be over."""
    loop = VirtualLoop()

    def now_us() -> int:
        return int(loop.now * 1e6)

    async def scenario() -> None:
        renewals = Renewals[str](LEASE, lambda held: None, now_us)
        await asyncio.sleep(LEASE)  # on the virtual clock
        asked_us, began = now_us(), loop.now
        loop.now += LEASE + 1
        for _ in range(2):
            assert renewals.until_us(asked_us) == (began + LEASE) * 1e6 < now_us()
            await asyncio.sleep(1)  # on the virtual clock
        assert renewals.until_us(now_us()) > now_us() + LEASE / 2 * 1e6
        renewals.close()

    loop.run_until_complete(scenario())
    loop.close()
