"""A coroutine that runs to its first wait at once, and is awaited later."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from notify.server.data.eager import Eager


class Work:
    """Notes how far it came; waits for `first`, and then for a turn of the loop."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        try:
            self.reached.append("begun")
            found = await self.first
            self.reached.append("waited")
            await asyncio.sleep(0)  # a turn of the loop
            return found
        finally:
            self.reached.append("ended")


def on_a_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    asyncio.run(run())


@pytest.mark.parametrize("is_set_before", [True, False])
def test_it_begins_at_once_and_gives_its_result_when_awaited(is_set_before: bool) -> None:
    async def scenario() -> None:
        work = Work()
        with Eager(work.run()) as begun:
            assert work.reached == ["begun"]
            if is_set_before:
                work.first.set_result(7)
            else:
                asyncio.get_running_loop().call_soon(work.first.set_result, 7)
            assert await begun == 7
        assert work.reached == ["begun", "waited", "ended"]

    on_a_loop(scenario)


def test_it_may_yield_to_the_loop_or_not_wait_at_all() -> None:
    async def yields() -> int:
        await asyncio.sleep(0)  # a turn of the loop
        return 1

    async def returns() -> int:
        return 2

    async def raises() -> int:
        raise KeyError("x")

    async def scenario() -> None:
        with Eager(yields()) as first, Eager(returns()) as second, Eager(raises()) as third:
            assert (await first, await second) == (1, 2)
            with pytest.raises(KeyError):
                await third

    on_a_loop(scenario)


def test_an_eager_coroutine_that_is_not_awaited_is_closed() -> None:
    async def scenario() -> None:
        work = Work()
        with pytest.raises(ZeroDivisionError), Eager(work.run()):
            raise ZeroDivisionError
        assert work.reached == ["begun", "ended"]

    on_a_loop(scenario)


def test_an_error_that_nobody_awaits_is_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A disk that fails has two waits of one request fail; the request says so once."""

    async def scenario() -> None:
        work = Work()
        with pytest.raises(ZeroDivisionError), Eager(work.run()):
            work.first.set_exception(KeyError("the same fault"))
            raise ZeroDivisionError
        assert work.reached == ["begun", "ended"]

    on_a_loop(scenario)
    gc.collect()
    assert caplog.records == []


def test_a_cancelled_task_ends_it() -> None:
    async def scenario() -> None:
        work = Work()

        async def waits() -> int:
            with Eager(work.run()) as begun:
                return await begun

        task = asyncio.create_task(waits())
        await asyncio.sleep(0)  # a turn of the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.reached == ["begun", "ended"]

    on_a_loop(scenario)
