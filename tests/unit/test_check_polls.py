"""Polls for checks leave nothing behind, and hold no more memory than their bounds while they wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from notify.check.schedule import CheckSchedule
from notify.errors import InvalidRequest, Unavailable
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import Poll
from notify.server.core.check_log import CheckLog
from notify.server.core.checks import ONLINE_US, Checks
from notify.server.data.permission import polling
from notify.server.data.request import Request
from notify.server.metrics import Metrics
from notify.storage.checks import Due
from notify.storage.log.pending import LEAST_COMPACTED, Pending, PendingTable
from notify.storage.log.queues import TopicsById
from notify.storage.log.records import Sender
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


async def test_a_poll_gets_its_checks_although_the_storage_takes_others_not_back() -> None:
    """It got them when its wait was over, which was longer than they held."""
    checks = checks_at(Clock())
    fits, other = (Due(ids.new_id(), 1, source, "", 0, ()) for source in ("a", "b"))
    due: list[Due] = []

    async def claim(*_: Any) -> list[Due]:
        return due

    async def refuse(*_: Any) -> None:
        raise Unavailable("too many writes are waiting")

    store: Any = checks._store
    store.claim_checks, store.release_checks = claim, refuse
    poll = Poll(producer_group="g", instance="i", sources=["a"], wait=LIMITS.wait_seconds)
    waiting = asyncio.ensure_future(checks.poll(poll))
    await asyncio.sleep(0)  # the poll begins
    (poller,) = checks._pollers["g"]
    due += [fits, other]
    with pytest.raises(Unavailable):
        await checks.hand_out("g")
    assert poller.answer.done() and poller.answer.result() == [fits]
    await waiting


def test_a_request_that_waits_does_not_hold_its_body() -> None:
    request = Request("POST", "/v1/checks/poll", b"", [])
    request.body = b"{}" + b" " * 100
    with polling(request, Clock()):
        assert request.polls and request.body == b""


# --- the schedule of checks holds what may still be checked: not what was decided, nor groups without a transaction

SECOND = 1_000_000
T0 = 1_800_000_000_000_000


def begin(table: PendingTable, group: str, due_us: int) -> bytes:
    """Add an undecided transaction of a group; returns its id."""
    transaction_id = ids.new_id()
    table.by_id[transaction_id] = Pending(transaction_id, Sender(group, "", "", 5 * SECOND), [], T0, due_us)
    table.schedule(group, due_us, (transaction_id,))
    return transaction_id


def test_transactions_that_were_decided_late_are_forgotten_although_nobody_polls_for_their_group() -> None:
    """Each one that took longer than `check_after` stayed on the schedule until the server's next start."""
    table = PendingTable(TopicsById())
    open_ids = [begin(table, "g", T0 + SECOND)]
    for _ in range(3 * LEAST_COMPACTED):
        transaction_id = begin(table, "g", T0 + SECOND)
        table.ripen(T0 + 2 * SECOND)
        del table.by_id[transaction_id]
    assert len(table._schedules["g"].heap) <= LEAST_COMPACTED
    claimed = table.claim("g", T0 + 2 * SECOND, 100, 10 * SECOND)
    assert [due.id for due in claimed] == open_ids


def test_a_group_without_an_undecided_transaction_has_no_schedule() -> None:
    """Each turn of the server went through every producer group that had sent anything since the start."""
    table = PendingTable(TopicsById())
    decided = [begin(table, f"g{number}", T0 + SECOND) for number in range(3)]
    undecided = begin(table, "waits", T0 + SECOND)
    for transaction_id in decided:
        del table.by_id[transaction_id]
    table.ripen(T0)
    assert len(table._schedules) == 4
    table.ripen(T0 + SECOND)
    assert list(table._schedules) == ["waits"] and table.next_us("g0") is None
    assert [due.id for due in table.claim("waits", T0 + SECOND, 100, 10 * SECOND)] == [undecided]
    begin(table, "g0", T0 + 2 * SECOND)
    assert table.next_us("g0") == T0 + 2 * SECOND
