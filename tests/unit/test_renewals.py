"""Leases are renewed while their handlers run; a loop that stood still for longer than a lease is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from notify.client.renewals import TELL_SECONDS, Renewals
from tests.support.virtual_loop import VirtualLoop

LEASE = 30.0


def test_a_loop_that_stood_still_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualLoop()
    renewed: list[str] = []

    async def scenario() -> None:
        renewals = Renewals(LEASE, renewed.append)
        for blocked, logged in ((LEASE / 2, 0), (1.1 * LEASE, 1), (LEASE, 1), (LEASE + TELL_SECONDS, 2)):
            renewals.begin("r")
            loop.now += blocked
            renewals.end("r")
            assert len(caplog.messages) == logged, blocked
        renewals.begin("slow")
        await asyncio.sleep(0.9 * LEASE)  # on the virtual clock
        assert renewed == ["slow"] * 2 and len(caplog.messages) == 2
        loop.now += TELL_SECONDS
        await asyncio.sleep(0.01)  # on the virtual clock
        renewals.end("slow")
        assert len(renewed) == 3 and len(caplog.messages) == 3

    with caplog.at_level(logging.WARNING, "notify.consumer"):
        loop.run_until_complete(scenario())
    loop.close()
    assert "stood still for more than 23.0 s" in caplog.messages[0] and "Consumer" in caplog.messages[0]
