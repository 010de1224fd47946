"""Work that has a share of the server's time: its turns, and the pauses between them."""

from __future__ import annotations

import asyncio

import pytest

from notify.server.rate import MOST_PAUSE_SECONDS, ShareOfTime
from tests.support.virtual_loop import VirtualLoop, pass_seconds


def ends(share: float, turns: list[tuple[float, float]]) -> list[float]:
    """When each of these turns ends that are asked for at once: (the seconds of its work, of its waiting)."""
    loop = VirtualLoop()

    async def run() -> list[float]:
        searches, ended = ShareOfTime(share, loop.time), []
        for work, waiting in turns:
            async with searches.turn():
                await pass_seconds(work)
                with searches.waiting():
                    await pass_seconds(waiting)
            ended.append(loop.time())
        return ended

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_turn_ends_with_its_work_and_the_next_one_begins_after_the_pause() -> None:
    """The pause came at the end of a turn, so that a page waited for its own: 5.7 times as long as for its work."""
    assert ends(0.25, [(0.1, 0), (0.1, 0), (0.1, 0)]) == pytest.approx([0.1, 0.5, 0.9])


def test_waiting_for_others_is_not_paid_with_a_pause() -> None:
    """A page of dead letters waits for the sync of a frame that producers have filled: under load 50 ms and more."""
    assert ends(0.25, [(0.1, 0.4), (0.1, 0)]) == pytest.approx([0.5, 0.9])


def test_a_pause_has_a_bound() -> None:
    assert ends(0.01, [(5.0, 0), (0.1, 0)]) == pytest.approx([5.0, 5.0 + MOST_PAUSE_SECONDS + 0.1])


def test_a_turn_that_fails_or_is_cancelled_frees_the_next() -> None:
    async def run() -> str:
        searches = ShareOfTime(0.5)

        async def wait() -> None:
            async with searches.turn():
                await asyncio.Event().wait()

        held = asyncio.create_task(wait())
        await asyncio.sleep(0)  # the task begins its turn
        held.cancel()
        with pytest.raises(ValueError):
            async with searches.turn():
                raise ValueError
        async with searches.turn():
            return "free"

    assert asyncio.run(run()) == "free"
