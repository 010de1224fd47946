"""Work for strangers gets turns on the event loop: one in each, a small share while others keep it busy, each address
in turn."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from notify.server.connections.turns import Turns
from tests.support.virtual_loop import pass_seconds

pytestmark = pytest.mark.virtual_time


class Clocks:
    """Both clocks of Turns: of the loop's time, and of the work that a test says was done."""

    def __init__(self) -> None:
        self.worked = 0.0

    def passed(self) -> float:
        return asyncio.get_running_loop().time()


async def test_a_flood_gets_the_least_share_of_a_busy_loop() -> None:
    clocks = Clocks()
    turns = Turns(0.1, clocks.passed, lambda: clocks.worked)
    begun = 0

    async def page() -> None:
        clocks.worked += 0.001

    def begin() -> None:
        nonlocal begun
        begun += 1
        tasks.add(asyncio.get_running_loop().create_task(turns.timed(page)))
        if turns.share < 1:  # work takes no time here: with the whole share this would never end
            turns.wait("stranger", begin)  # a loop asks again when it is answered

    tasks: set[asyncio.Task[None]] = set()
    for _ in range(300):
        clocks.worked += 0.0009
        await pass_seconds(0.001)
    turns.wait("stranger", begin)  # the load is measured
    await pass_seconds(0.001)
    turns.wait("stranger", begin)
    assert turns.share == 0.1
    before = begun
    for _ in range(1000):
        clocks.worked += 0.0009
        await pass_seconds(0.001)
    assert 50 < begun - before < 150  # a tenth of a second, at a millisecond each


async def test_an_idle_loop_makes_nobody_wait() -> None:
    clocks = Clocks()
    turns = Turns(0.1, clocks.passed, lambda: clocks.worked)
    begun: list[float] = []

    async def page() -> None:
        clocks.worked += 0.02

    def begin() -> None:
        begun.append(asyncio.get_running_loop().time())
        asyncio.get_running_loop().create_task(turns.timed(page)).add_done_callback(lambda _: None)

    for _ in range(10):
        asked = asyncio.get_running_loop().time()
        turns.wait("operator", begin)
        await pass_seconds(0.05)
        assert begun[-1] == asked


async def test_addresses_take_turns() -> None:
    clocks = Clocks()
    turns = Turns(0.1, clocks.passed, lambda: clocks.worked)
    begun: list[str] = []
    for n in range(1000):
        turns.wait("flood", lambda n=n: begun.append(f"flood {n}"))  # type: ignore[misc]
    turns.wait("operator", lambda: begun.append("operator"))
    await pass_seconds(10)
    assert begun.index("operator") < 3 and Counter(text.split()[0] for text in begun)["flood"] == 1000


async def test_work_that_fails_or_is_cancelled_does_not_stop_the_turns() -> None:
    turns = Turns(0.1)
    begun: list[str] = []

    async def fails() -> None:
        raise ValueError

    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    def cancelled() -> None:
        task = asyncio.get_running_loop().create_task(turns.timed(waits))
        task.cancel()
        tasks.append(task)

    tasks: list[asyncio.Task[None]] = []
    turns.wait("a", lambda: tasks.append(asyncio.get_running_loop().create_task(turns.timed(fails))))
    turns.wait("a", cancelled)
    turns.wait("a", lambda: begun.append("the last"))
    await pass_seconds(1)
    assert begun == ["the last"] and [type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)] == [
        ValueError,
        asyncio.CancelledError,
    ]
