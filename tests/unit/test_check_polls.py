"""Polls for checks leave nothing behind, and hold no more memory than their bounds while they wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from notify.check.schedule import CheckSchedule
from notify.errors import InvalidRequest
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Poll
from notify.server.core.check_log import CheckLog
from notify.server.core.checks import ONLINE_US, Checks
from notify.server.data.permission import polling
from notify.server.data.request import Request
from notify.server.metrics import Metrics
from notify.storage.memory import MemoryStore


class Clock:
    now_us = 1_800_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


def checks_at(clock: Clock) -> Checks:
    return Checks(MemoryStore(), clock, CheckSchedule(), "main", Metrics(), CheckLog())


async def test_a_group_that_polled_is_forgotten() -> None:
    """Each name of a group that anybody had polled for stayed in memory until the server's next start."""
    clock = Clock()
    checks = checks_at(clock)
    waiting = asyncio.ensure_future(checks.poll(Poll(producer_group="waits", instance="i", wait=60)))
    await asyncio.sleep(0)  # the poll begins
    for number in range(100):
        await checks.poll(Poll(producer_group=f"g{number}", instance="i"))
    assert checks.is_online("g0") and checks.is_online("waits")
    clock.now_us += ONLINE_US
    await checks.tick()
    assert list(checks._pollers) == ["waits"] and not checks._polled_us
    assert checks.is_online("waits") and not checks.is_online("g0")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not checks._pollers


@pytest.mark.parametrize(
    "beyond",
    [
        {"instance": "i" * 256},
        {"topics": ["t"] * (LIMITS.topics + 1)},
        {"topics": ["no topic"]},
        {"sources": ["s"] * (LIMITS.topics + 1)},
        {"sources": ["s" * 256]},
    ],
)
async def test_a_poll_beyond_a_bound_is_refused(beyond: dict[str, Any]) -> None:
    """A poll of 8 MiB held 120 MB while it waited."""
    with pytest.raises(InvalidRequest):
        await checks_at(Clock()).poll(Poll(**{"producer_group": "g", "instance": "i"} | beyond))


def test_a_request_that_waits_does_not_hold_its_body() -> None:
    request = Request("POST", "/v1/checks/poll", b"", [])
    request.body = b"{}" + b" " * 100
    with polling(request, Clock()):
        assert request.polls and request.body == b""
