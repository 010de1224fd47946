"""A producer whose first use comes when threads hardly start: the main thread has ended, or no more are allowed."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from notify.client import Consumer, Message, TransactionProducer
from notify.client.producer import outgoing
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
LEFT_BEHIND = """
import sys, threading
import sqlalchemy as sa
from notify.client import Message, TransactionProducer, create_tables, use_explicit_begin

engine = sa.create_engine(f"sqlite:///{sys.argv[3]}/shop.db")
use_explicit_begin(engine)
create_tables(engine)
producer = TransactionProducer(sys.argv[1], group="g", engine=engine, mode="auto")

def send():
    threading.main_thread().join()
    with engine.connect() as connection, producer.transaction(connection) as transaction:
        transaction.send(Message(sys.argv[2], "left behind"))
    print("committed", flush=True)
    sys.stdin.readline()
    assert producer.flush(60) == []

threading.Thread(target=send).start()
"""
NO_THREADS = """
import sys, threading
from notify.client import Consumer, Message, TransactionProducer
from notify.errors import BindingRefused

threading.stack_size(1 << 50)  # more than a process can address
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
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
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


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="CPython 3.12.0 to 3.12.2 start no thread then (issue 113964)"
)
def test_rows_left_behind_are_sent_after_the_main_threads_end(
    memory: InMemoryServer, unique: str, tmp_path: Path
) -> None:
    """A service whose threads outlive its main thread sent none of them, and logged a traceback every few seconds."""
    arguments = [sys.executable, "-c", LEFT_BEHIND, memory.url, unique, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        with memory.down():
            assert program.stdout.readline() == "committed\n"
        _, errors = program.communicate("\n", timeout=2 * PATIENCE_SECONDS)
    assert program.returncode == 0 and "Traceback" not in errors, errors
    assert [message.text for message in memory.messages(unique)] == ["left behind"]


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="CPython 3.12.0 to 3.12.2 start no thread then (issue 113964)"
)
def test_names_are_looked_up_after_the_main_threads_end(memory: InMemoryServer, unique: str) -> None:
    """Without uvloop asyncio looks them up in threads of its own, which end with the main thread."""
    url = memory.url.replace("127.0.0.1", "localhost")
    run("import sys\nsys.modules['uvloop'] = None\n" + AFTER_MAIN, url, unique)
    assert [message.text for message in memory.messages(unique)] == ["late"]


def test_a_process_that_can_start_no_thread_says_so(memory: InMemoryServer, unique: str) -> None:
    sentences = run(NO_THREADS, memory.url, unique).splitlines()
    assert len(sentences) == 2
    for sentence in sentences:
        assert "cannot start the thread that Notify needs (can't start new thread)" in sentence


def test_producers_that_nobody_closes_are_counted(
    memory: InMemoryServer, unique: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each request kept its thread and seven files, until the process could open no more."""
    monkeypatch.setattr(outgoing, "_open", weakref.WeakSet())
    with contextlib.ExitStack() as stack:
        for _ in range(outgoing.MANY):
            assert not caplog.records
            stack.enter_context(TransactionProducer(memory.url, group=unique)).publish(Message(unique, "x"))
        assert f"{outgoing.MANY} producers are open" in caplog.text


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_neither_a_producer_nor_a_consumer_is_passed_to_a_child(
    memory: InMemoryServer, copied: Callable[[object], object]
) -> None:
    """`multiprocessing` said that it cannot pickle a lock."""
    for one in (TransactionProducer(memory.url, group="g"), Consumer(memory.url, group="g")):
        with pytest.raises(TypeError, match=r"make one in each process"):
            copied(one)


BESIDE_THE_MAIN_ONE = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

program = f'''
import sys
sys.path[:0] = {sys.path!r}
from notify.client import Message, TransactionProducer
producer = TransactionProducer({sys.argv[1]!r}, group="g")
producer.publish(Message({sys.argv[2]!r}, "sent"))
producer.close()
'''
interpreters.run_string(interpreters.create(isolated=False), program)
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the interface is another one")
def test_a_producer_in_another_interpreter_of_its_process_closes(memory: InMemoryServer, unique: str) -> None:
    """mod_wsgi runs each application in one. A close of uvloop's loop never returned there."""
    run(BESIDE_THE_MAIN_ONE, memory.url, unique)
    assert [message.text for message in memory.messages(unique)] == ["sent"]
