"""The threads that call handlers: so many at most, and none of them keeps its process from ending."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future

import pytest

from notify.client import Message, TransactionProducer
from notify.client.threads.handler_threads import HandlerThreads
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS


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
