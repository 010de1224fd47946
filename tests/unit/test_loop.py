"""The loop in its own thread: a caller that waits while the loop is closed gets an error, and does not hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from notify.client.loop import LoopThread
from notify.errors import Closed
from tests.support.clock import PATIENCE_SECONDS


def test_who_waits_while_it_is_closed_is_told() -> None:
    loop = LoopThread("test")
    began = threading.Event()

    async def never_answered() -> None:
        began.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.run, never_answered())
        assert began.wait(PATIENCE_SECONDS)
        loop.close()
        try:
            with pytest.raises(Closed):
                waiting.result(PATIENCE_SECONDS)
        finally:
            if not waiting.done():  # otherwise the pool would wait for ever
                waiting.cancel()
                pool.shutdown(wait=False)


def test_who_comes_after_it_was_closed_is_told() -> None:
    loop = LoopThread("test")
    loop.close()
    called: list[int] = []

    async def nothing() -> None:
        called.append(1)

    with pytest.raises(Closed):
        loop.run(nothing())
    with pytest.raises(Closed):
        loop.wait_for(lambda: asyncio.ensure_future(nothing()), 1)
    loop.call(called.append, 1)  # an outcome after its COMMIT is lost silently: the server will check
    assert called == []
