"""The loop in its own thread: a caller that waits while the loop is closed gets an error, and does not hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from typing import Any

import pytest

from notify.client.threads.loop import LoopThread
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


def test_a_call_after_the_close_is_refused() -> None:
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


def test_a_signal_that_another_thread_gets_is_handled() -> None:
    """A consumer did not hear SIGTERM where the system handed it to another thread: its main thread kept waiting."""
    assert threading.current_thread() is threading.main_thread()
    loop = LoopThread("test")
    handled, began = asyncio.Event(), threading.Event()

    async def until_handled() -> str:
        began.set()
        await asyncio.wait_for(handled.wait(), PATIENCE_SECONDS)
        return "handled"

    def send() -> None:
        assert began.wait(PATIENCE_SECONDS)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: loop.loop.call_soon_threadsafe(handled.set))
    try:
        threading.Thread(target=send, daemon=True).start()
        assert loop.run(until_handled()) == "handled"
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


def test_an_error_of_time_is_the_coroutines_own() -> None:
    loop = LoopThread("test")

    async def too_late() -> None:
        raise TimeoutError("too late")

    try:
        with pytest.raises(TimeoutError):
            loop.run(too_late())
    finally:
        loop.close()


def test_a_handler_that_waits_in_the_thread_that_begins_to_wait_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler that committed through the same producer at that instant waited for its own thread."""
    loop = LoopThread("test")
    answers: list[str] = []
    to_come = ["later"]

    async def answer(text: str) -> str:
        return text

    begin = asyncio.run_coroutine_threadsafe

    def interrupted(*arguments: Any) -> Any:
        if to_come:
            answers.append(loop.run(answer(to_come.pop()), PATIENCE_SECONDS))
        return begin(*arguments)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    thread = threading.Thread(target=lambda: answers.append(loop.run(answer("first"), PATIENCE_SECONDS)), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive() and answers == ["later", "first"]
    loop.close()
