"""The threads of the SDK: its loop, those that call handlers, and a fork in the middle of their work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from notify.client import Message, TransactionProducer
from notify.client.threads import forks
from notify.client.threads.handler_threads import HandlerThreads
from notify.client.threads.loop import LoopThread
from notify.errors import Closed
from notify.testing import InMemoryServer
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


@pytest.mark.parametrize("is_made_before", [True, False])
def test_its_timers_fire_while_a_test_of_the_service_has_frozen_the_time(
    monkeypatch: pytest.MonkeyPatch, is_made_before: bool
) -> None:
    """A producer hung in its close under freezegun, where uvloop was not installed."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    made = LoopThread("test") if is_made_before else None
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: 2e9)  # as freezegun does
        loop = made or LoopThread("test")
        loop.run(asyncio.sleep(0.001), PATIENCE_SECONDS)  # the timer that has to fire
    loop.close()


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


# --- the threads that call handlers: so many at most, and none of them keeps its process from ending ----------------


def test_work_is_done_by_so_many_threads_at_most() -> None:
    threads = HandlerThreads(2, "test")
    both = threading.Barrier(2)
    names = set()

    def work(number: int) -> int:
        both.wait(PATIENCE_SECONDS)
        names.add(threading.current_thread().name)
        return number

    results = [threads.submit(work, number) for number in range(8)]
    assert [result.result(PATIENCE_SECONDS) for result in results] == list(range(8))
    assert names == {"test_1", "test_2"}
    threads.shutdown()


def test_a_thread_that_cannot_be_started_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many failures as there may be threads, nothing ran any more: messages stayed in hand, and their leases
    were renewed for ever. The work itself stayed queued, although its caller was told that it failed."""
    threads = HandlerThreads(1, "test")

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="new thread"):
            threads.submit(done.append, "refused")
    threads.submit(done.append, "taken").result(PATIENCE_SECONDS)
    assert done == ["taken"]

    busy = threading.Event()
    two = HandlerThreads(2, "test")
    first = two.submit(busy.wait, PATIENCE_SECONDS)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        second = two.submit(done.append, "by the other thread")
    busy.set()
    assert first.result(PATIENCE_SECONDS) and second.result(PATIENCE_SECONDS) is None
    assert done[-1] == "by the other thread"
    threads.shutdown()
    two.shutdown()


def test_an_error_of_a_job_is_its_result() -> None:
    threads = HandlerThreads(1, "test")
    for error in (KeyError("a"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        assert threads.submit(fail).exception(PATIENCE_SECONDS) is error
    assert threads.submit(lambda: "goes on").result(PATIENCE_SECONDS) == "goes on"
    threads.shutdown()


def test_an_exception_that_another_thread_raises_in_an_idle_thread_is_told() -> None:
    told: Future[BaseException] = Future()
    threads = HandlerThreads(1, "test", told.set_result)
    number = threads.submit(threading.get_ident).result(PATIENCE_SECONDS)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(KeyError))
    threads.submit(print)  # wakes the thread, and is lost
    assert isinstance(told.result(PATIENCE_SECONDS), KeyError)


def test_a_stop_of_an_iteration_is_an_error_that_asyncio_holds() -> None:
    """It may come from a listener of the inbox's session. No future of asyncio takes it: the message was never settled,
    and its lease was renewed for ever."""

    async def run() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            call = asyncio.get_running_loop().run_in_executor(threads, next, iter(()))
            await asyncio.wait_for(call, PATIENCE_SECONDS)

    threads = HandlerThreads(1, "test")
    asyncio.run(run())
    threads.shutdown()


def test_a_shutdown_cancels_what_has_not_begun_and_ends_the_threads() -> None:
    threads = HandlerThreads(1, "ending")
    begun, end = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        end.wait(PATIENCE_SECONDS)
        return "done"

    first, second = threads.submit(work), threads.submit(work)
    assert begun.wait(PATIENCE_SECONDS)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "ending_1"]
    threads.shutdown()
    end.set()
    assert first.result(PATIENCE_SECONDS) == "done"
    with pytest.raises(CancelledError):
        second.result(PATIENCE_SECONDS)
    with pytest.raises(RuntimeError, match="has ended"):
        threads.submit(work)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


HANGING = """
import os, signal, sys, threading
from notify.client import Consumer

consumer = Consumer(sys.argv[1], group="hanging", drain=0.1)

@consumer.subscribe("hanging", start="earliest")
def hang(message):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

consumer.run()
print("ended")
"""


@pytest.mark.long
def test_a_process_ends_although_a_handler_never_does(memory: InMemoryServer) -> None:
    """It continued until the handler returned, however short `drain` was."""
    with TransactionProducer(memory.url, group="hanging") as producer:
        producer.publish(Message("hanging", "a"))
    command = [sys.executable, "-c", HANGING, memory.url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


# --- A fork waits for threads that are in the middle of using the service's engine, within a bound ------------------


def forking(gate: forks._Gate) -> tuple[threading.Thread, threading.Event]:
    """A thread that forks, and whether it has got that far."""
    has_forked = threading.Event()

    def fork() -> None:
        gate.close()
        has_forked.set()

    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    return thread, has_forked


def test_a_fork_waits_for_those_inside_and_those_outside_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked while a thread opened the engine's first connection waited for its lock for ever."""
    monkeypatch.setattr(forks, "FORK_SECONDS", PATIENCE_SECONDS)
    gate = forks._Gate()
    gate.enter()
    thread, has_forked = forking(gate)
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._is_forking or has_forked.is_set(), 0) or not has_forked.is_set()
    assert not has_forked.is_set()
    gate.leave()
    assert has_forked.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    entered = threading.Event()
    late = threading.Thread(target=lambda: (gate.enter(), entered.set()), daemon=True)
    late.start()
    assert not entered.is_set()
    gate.open()
    assert entered.wait(PATIENCE_SECONDS)
    late.join(PATIENCE_SECONDS)


def test_a_fork_does_not_wait_for_its_own_thread() -> None:
    gate = forks._Gate()
    gate.enter()
    gate.close()
    gate.open()
    gate.leave()


def test_a_fork_waits_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "FORK_SECONDS", 0.01)
    gate = forks._Gate()
    gate.enter()
    thread, has_forked = forking(gate)
    assert has_forked.wait(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
