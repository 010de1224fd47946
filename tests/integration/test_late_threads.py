"""A producer whose first use comes when threads hardly start: the main thread has ended, or no more are allowed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS

AFTER_MAIN = """
import sys, threading
from notify.client import Message, TransactionProducer

producer = TransactionProducer(sys.argv[1], group="g")

def send():
    threading.main_thread().join()
    producer.publish(Message(sys.argv[2], "late"))

threading.Thread(target=send).start()
"""
NO_THREADS = """
import sys, threading
from notify.client import Consumer, Message, TransactionProducer
from notify.errors import BindingRefused

threading.stack_size(1 << 46)  # no system has so much memory for it
consumer = Consumer(sys.argv[1], group="g")
consumer.subscribe("t")(print)
for use in (lambda: TransactionProducer(sys.argv[1], group="g").publish(Message(sys.argv[2], "x")), consumer.run):
    try:
        use()
    except BindingRefused as error:
        print(error)
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="CPython 3.12.0 to 3.12.2 start no thread then (issue 113964)"
)
def test_the_first_message_may_come_after_the_main_threads_end(memory: InMemoryServer, unique: str) -> None:
    """It was refused with "can't register atexit after shutdown"."""
    run(AFTER_MAIN, memory.url, unique)
    assert [message.text for message in memory.messages(unique)] == ["late"]


def test_a_process_that_can_start_no_thread_says_so(memory: InMemoryServer, unique: str) -> None:
    sentences = run(NO_THREADS, memory.url, unique).splitlines()
    assert len(sentences) == 2
    for sentence in sentences:
        assert "cannot start the thread that Notify needs (can't start new thread)" in sentence
