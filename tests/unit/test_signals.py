"""The first signal asks a process to stop in good order, the second one ends it at once."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn

from notify.client import Message, TransactionProducer
from notify.runtime import signals
from notify.server.serve import Server
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS
from tests.support.groups import lag
from tests.support.told import CONSUMING, Told

WORKING = """
import asyncio, sys
from notify.runtime.signals import run_until_signal

async def work():
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            print("told", flush=True)
            if sys.argv[1] == "heeds":
                raise

run_until_signal(work)
print("ended", flush=True)
"""

EXITING = """
import signal, sys, time
from notify.runtime.signals import exit_on_signal

signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1:] == ["nohup"] else signal.SIG_DFL)
with exit_on_signal():
    try:
        print("begun", flush=True)
        while True:  # a signal just before a wait without an end would never be noticed
            time.sleep(0.05)
    finally:
        print("ended", flush=True)
"""


def test_a_handler_that_is_not_pythons_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host such as uWSGI has set one before Python started, which cannot put it back: the consumer ended with a
    TypeError, which hid its own error."""
    real, before = signal.signal, {number: signal.getsignal(number) for number in signals.SIGNALS}

    def of_another(number: int, handler: Any) -> None:
        real(number, handler)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(signal, "signal", of_another)
        with signals.heeding_signals(lambda: None):
            raise KeyError
    for number, handler in before.items():
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, handler)


def test_signals_close_together_are_one_wish() -> None:
    """Ctrl-C reaches a program twice where what started it passes it on."""

    def counted(times: Sequence[float]) -> list[int]:
        wishes = signals.StopRequests(iter(times).__next__)
        return [wishes.count() for _ in times]

    assert counted([5.0, 5.01, 5.09, 5.5, 5.51, 9.0]) == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_server_shuts_down_cleanly_at_a_ctrl_c_that_arrives_twice(is_alone: bool) -> None:
    """uvicorn took the second one for the wish to end without a shutdown: it ended with tracebacks."""
    server = Server(uvicorn.Config("an app that is not loaded"), is_alone)
    try:
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert server.should_exit and not server.force_exit


@pytest.mark.parametrize("number", [*signals.SIGNALS, signal.SIGHUP])
def test_work_is_cancelled_by_the_first_signal_and_cut_by_the_second(number: int) -> None:
    with Told(WORKING, "heeds") as heeding, Told(WORKING, "ignores") as deaf:
        heeding.tell("begun", number)
        deaf.tell("begun", number)
        deaf.tell("told", number)
        assert (heeding.end(), heeding.output) == (0, "begun\ntold\nended\n")
        assert (deaf.end(), deaf.output) == (-number, "begun\ntold\n")


def test_a_program_that_exits_when_told_stays_where_nohup_began_it() -> None:
    with Told(EXITING) as told, Told(EXITING, "nohup") as staying:
        told.tell("begun", signal.SIGHUP)
        assert (told.end(), told.output) == (128 + signal.SIGHUP, "begun\nended\n")
        staying.tell("begun", signal.SIGHUP)
        staying.tell("begun", signal.SIGTERM)
        assert (staying.end(), staying.output) == (128 + signal.SIGTERM, "begun\nended\n")


def test_a_second_signal_ends_a_consumer_and_its_message_comes_again(memory: InMemoryServer) -> None:
    """It continued until the handlers had returned, or `drain` was over, however often it was told."""
    with TransactionProducer(memory.url, group="cut") as producer:
        producer.publish(Message("cut", "a"))
    with Told(CONSUMING, memory.url, "cut", "shared") as consumer:
        consumer.tell("handling", signal.SIGTERM)
        consumer.tell("the consumer stops", signal.SIGTERM)
        assert consumer.end() == 128 + signal.SIGTERM
    assert "ended" not in consumer.output and "Traceback" not in consumer.output
    assert lag(memory.url, "cut") == 1


FORKING = """
import multiprocessing, sys, time
from notify.runtime.signals import heeding_signals

processes = multiprocessing.get_context("fork")
begun = processes.Event()

def work():
    begun.set()
    time.sleep(3600)

with heeding_signals(lambda: print("the parent is told", flush=True)):
    child = processes.Process(target=work)
    child.start()
    begun.wait()  # Python forgets a signal that comes while it forks
    child.terminate()
    child.join(float(sys.argv[1]))
    print("code", child.exitcode, flush=True)
    child.kill()
"""

FIRST = """
import os, signal, time
from notify.runtime.signals import SAME_REQUEST_SECONDS, heeding_signals

assert os.getpid() == 1
with heeding_signals(lambda: print("told", flush=True)):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(SAME_REQUEST_SECONDS)  # what comes sooner after another signal counts as the same one
    signal.raise_signal(signal.SIGTERM)
    print("continued", flush=True)
"""


def test_a_child_that_a_handler_forks_ends_when_it_is_told() -> None:
    """It inherited what the consumer does at a signal, which ended nothing in the child: `terminate` had no effect."""
    with Told(FORKING, str(PATIENCE_SECONDS / 2)) as forking:
        assert forking.end() == 0
    assert forking.output == f"code {-signal.SIGTERM}\n"


def test_the_first_process_of_a_container_is_cut_by_the_second_signal() -> None:
    """The system keeps the default action of a signal from it: it continued, and heeded no further signal."""
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*inside, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("only root makes a namespace of processes here")
    first = subprocess.run([*inside, sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert (first.returncode, first.stdout) == (128 + signal.SIGTERM, "told\n"), first.stderr
