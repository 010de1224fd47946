"""A thread that sends alone does so by itself; the loop sends whatever that does not get through, once in all."""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
import warnings
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

import pytest

from notify.client import Message, TransactionProducer
from notify.client.producer import blocking, outgoing
from notify.client.producer.packing import pack
from notify.client.producer.transactions import OUTCOMES, TransactionClient
from notify.client.transport import http
from notify.errors import Timeout
from notify.protocol import ids
from notify.protocol.wire import Item, Items, encode_msgpack
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import bodies as received
from tests.support.groups import drain, subscribe
from tests.support.proxy import Proxy


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine, too, connections are opened, answered and kept."""
    monkeypatch.setattr(blocking, "OPEN_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(blocking, "SILENT_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(outgoing, "FINISH_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def by_loop(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loop's part of what is sent, in order: `half` and the outcomes."""
    sent: list[str] = []
    half_soon, outcome_soon = TransactionClient.half_soon, TransactionClient.outcome_soon

    def noted_half(self: TransactionClient, *arguments: Any, **options: Any) -> Any:
        sent.append("half")
        return half_soon(self, *arguments, **options)

    def noted_outcome(self: TransactionClient, transaction_id: str, shard: str | None, outcome: str) -> Any:
        sent.append(outcome)
        return outcome_soon(self, transaction_id, shard, outcome)

    monkeypatch.setattr(TransactionClient, "half_soon", noted_half)
    monkeypatch.setattr(TransactionClient, "outcome_soon", noted_outcome)
    return sent


def commit(producer: TransactionProducer, topic: str, body: str) -> None:
    """A half and its outcome, as a session's commit sends them."""
    transaction_id = ids.to_text(ids.new_id())
    item = producer.outgoing.store_half(transaction_id, [pack(Message(topic, body))], "")
    assert item.id == transaction_id
    producer.outgoing.outcome_soon(transaction_id, item.shard, "COMMIT")


def commit_and_settle(producer: TransactionProducer, server: InMemoryServer, topic: str, number: int) -> None:
    """Commit the message of this number, and wait until nothing is on its way."""
    commit(producer, topic, str(number))
    server.wait_for(topic, number + 1, PATIENCE_SECONDS)
    producer.outgoing.flush_at_exit(PATIENCE_SECONDS)


def bodies(server: InMemoryServer, topic: str, count: int) -> list[str]:
    """The bodies in the topic, once there are so many, sorted."""
    return sorted(message.text for message in server.wait_for(topic, count, PATIENCE_SECONDS))


def test_a_thread_that_is_alone_sends_by_itself(frozen: InMemoryServer, unique: str, by_loop: list[str]) -> None:
    with TransactionProducer(frozen.url, group=unique) as producer:
        for n in range(5):
            commit_and_settle(producer, frozen, unique, n)
    assert by_loop == ["half", "COMMIT"], "the first half finds the server"
    assert bodies(frozen, unique, 5) == ["0", "1", "2", "3", "4"]


def commit_with_key(producer: TransactionProducer, topic: str, body: str) -> str:
    """Commit a message with the key `k` by this thread; returns the id of the transaction."""
    transaction_id = ids.to_text(ids.new_id())
    item = producer.outgoing.store_half(transaction_id, [pack(Message(topic, body, key="k"))], "")
    producer.outgoing.outcome_soon(transaction_id, item.shard, "COMMIT")
    return transaction_id


def test_no_outcome_overtakes_one_that_the_loop_has_not_begun_to_send(frozen: InMemoryServer, unique: str) -> None:
    """The loop's thread may be late on a loaded machine, while the thread that commits is not."""
    with TransactionProducer(frozen.url, group=unique) as producer:
        for number in range(3):
            commit_and_settle(producer, frozen, unique, number)
        thread, _ = producer.outgoing.start()
        sender = producer.outgoing._blocking
        assert sender is not None and sender._outcome_connection.is_open
        is_late = threading.Event()
        thread.call(is_late.wait, PATIENCE_SECONDS)
        try:
            with sender._taking_outcome:  # as the loop does while it looks for an answer
                commit_with_key(producer, unique, "3")
            commit_with_key(producer, unique, "4")
        finally:
            is_late.set()
        assert [message.text for message in frozen.wait_for(unique, 5, PATIENCE_SECONDS)] == list("01234")


def test_the_loop_sends_an_unanswered_outcome_again_before_the_next(frozen: InMemoryServer, unique: str) -> None:
    """The next one leaves on another connection, which may lead to another server behind a balancer."""
    with TransactionProducer(frozen.url, group=unique) as producer:
        for number in range(3):
            commit_and_settle(producer, frozen, unique, number)
        _, running = producer.outgoing.start()
        sender = producer.outgoing._blocking
        assert sender is not None and sender._outcome_connection.is_open
        sender._outcome_connection.answer = lambda seconds: None  # type: ignore[method-assign]
        names = [commit_with_key(producer, unique, body) for body in "34"]
        eventually(lambda: list(running._outcomes)[-2:] == names, "the loop to send both")
        assert [message.text for message in frozen.wait_for(unique, 5, PATIENCE_SECONDS)] == list("01234")


def test_threads_at_once_send_everything_once(frozen: InMemoryServer, unique: str) -> None:
    def send(number: int) -> None:
        for n in range(20):
            commit(producer, unique, f"{number:02}.{n:02}")

    with TransactionProducer(frozen.url, group=unique) as producer:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert bodies(frozen, unique, 160) == [f"{number:02}.{n:02}" for number in range(8) for n in range(20)]


def test_close_waits_for_the_answers_to_sent_requests(frozen: InMemoryServer, unique: str) -> None:
    for count in range(2, 7):
        with TransactionProducer(frozen.url, group=unique) as producer:
            for n in range(count):
                commit(producer, f"{unique}.{count}", str(n))
        assert len(frozen.messages(f"{unique}.{count}")) == count


def test_an_outcome_that_the_server_refuses_is_sent_again(
    frozen: InMemoryServer, unique: str, by_loop: list[str]
) -> None:
    with TransactionProducer(frozen.url, group=unique) as producer:
        commit_and_settle(producer, frozen, unique, 0)
        transaction_id = ids.to_text(ids.new_id())
        item = producer.outgoing.store_half(transaction_id, [pack(Message(unique, "1"))], "")
        with frozen.down():
            before = frozen.answered(OUTCOMES)
            producer.outgoing.outcome_soon(transaction_id, item.shard, "COMMIT")
            eventually(lambda: frozen.answered(OUTCOMES) > before, "the outcome to be refused")
        assert bodies(frozen, unique, 2) == ["0", "1"]
    assert by_loop == ["half", "COMMIT", "COMMIT"]


def test_an_outcome_whose_shard_is_away_for_the_moment_is_sent_again(
    frozen: InMemoryServer, unique: str, by_loop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is answered with 200, and its only item with 503."""
    with TransactionProducer(frozen.url, group=unique) as producer:
        commit_and_settle(producer, frozen, unique, 0)
        assert producer.outgoing._blocking is not None
        outcome_connection = producer.outgoing._blocking._outcome_connection
        read, not_now = outcome_connection.answer, encode_msgpack(Items([Item(id="x", status=503)]))

        def answer(seconds: float) -> tuple[int, bytes] | None:
            return None if read(seconds) is None else (200, not_now)

        monkeypatch.setattr(outcome_connection, "answer", answer)
        commit(producer, unique, "1")
        producer.outgoing.flush_at_exit(PATIENCE_SECONDS)
    assert by_loop == ["half", "COMMIT", "COMMIT"]


@pytest.mark.parametrize("answer", [False, True], ids=["before it arrives", "before its answer arrives"])
@pytest.mark.parametrize("path", ["transactions HTTP", "transactions/outcomes"])
def test_a_connection_that_breaks(
    frozen: InMemoryServer, unique: str, by_loop: list[str], path: str, answer: bool
) -> None:
    with (
        Proxy("127.0.0.1", urlsplit(frozen.url).port or 0) as proxy,
        TransactionProducer(f"http://127.0.0.1:{proxy.port}", group=unique) as producer,
    ):
        for n in range(2):
            commit_and_settle(producer, frozen, unique, n)
        by_loop.clear()
        proxy.cut_at(path.encode(), answer=answer)
        commit(producer, unique, "2")
        assert bodies(frozen, unique, 3) == ["0", "1", "2"]
        eventually(lambda: proxy.has_cut and bool(by_loop), "the loop to send what was cut off")
        commit(producer, unique, "3")
    assert bodies(frozen, unique, 4) == ["0", "1", "2", "3"]
    assert by_loop[0] == ("half" if "HTTP" in path else "COMMIT")


def test_a_half_that_is_not_answered_in_time(frozen: InMemoryServer, unique: str) -> None:
    with (
        Proxy("127.0.0.1", urlsplit(frozen.url).port or 0) as proxy,
        TransactionProducer(f"http://127.0.0.1:{proxy.port}", group=unique) as producer,
    ):
        commit_and_settle(producer, frozen, unique, 0)
        impatient = blocking.BlockingSender(*producer.outgoing.start(), 0.1)
        impatient.loop_was_answered()
        proxy.drop_answers = True
        with pytest.raises(Timeout):
            impatient.store_half(ids.to_text(ids.new_id()), [pack(Message(unique, "1"))], "")
        eventually(lambda: [half.text for half in frozen.halves(unique)] == ["1"], "the half to be stored")
        proxy.drop_answers = False
        impatient.close(0.0)


def test_connections_that_nobody_uses_are_closed(
    frozen: InMemoryServer, unique: str, by_loop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with TransactionProducer(frozen.url, group=unique) as producer:
        commit_and_settle(producer, frozen, unique, 0)
        before = frozen.open_connections()
        commit(producer, unique, "1")
        eventually(lambda: frozen.open_connections() == before + 2, "both connections to be open")
        monkeypatch.setattr(blocking, "SILENT_SECONDS", 0.0)
        eventually(lambda: frozen.open_connections() <= before, "both connections to be closed")
        commit(producer, unique, "2")
    assert by_loop == ["half", "COMMIT", "half", "COMMIT"]
    assert bodies(frozen, unique, 3) == ["0", "1", "2"]


def test_a_child_process_has_connections_of_its_own(server: ServerProcess, unique: str) -> None:
    subscribe(server.url, unique, unique)
    with TransactionProducer(server.url, group=unique) as producer:
        for n in range(20):
            commit(producer, unique, f"before {n}")
        producer.outgoing.flush_at_exit(PATIENCE_SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads run while the test forks
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for n in range(20):
                    commit(producer, unique, f"child {n}")
                producer.close()
                code = 0
            finally:
                os._exit(code)
        for n in range(20):
            commit(producer, unique, f"parent {n}")
        assert os.waitpid(pid, 0)[1] == 0
    sent = [f"{who} {n}" for who in ("before", "child", "parent") for n in range(20)]
    assert sorted(received(drain(server.url, unique, unique, 60))) == sorted(sent)


FILES = {blocking.__file__, http.__file__, outgoing.__file__}


class Interrupted:
    """A trace function that raises KeyboardInterrupt in the SDK's blocking path, as a signal's handler does: where the
    interpreter looks for signals, which is at the beginning of a function and after a call, the `at`th time."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code)):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    found = list(dis.get_instructions(code))
    return frozenset(after.offset for before, after in pairwise(found) if before.opname in ("CALL", "CALL_FUNCTION_EX"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what had a connection was interrupted
def test_an_interrupt_anywhere_leaves_no_answer_to_another_and_no_lock(
    frozen: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`commit` compares the ids of half and answer. Without a lock or a connection of its own, nobody would
    get on after."""
    monkeypatch.setattr(blocking, "TAKEN_SECONDS", 0.0)  # whoever is interrupted is gone
    for at in range(1, 1000):
        topic, interrupted = f"{unique}.{at}", Interrupted(at)
        with TransactionProducer(frozen.url, group=unique) as producer:
            commit(producer, topic, "0")
            producer.outgoing.flush_at_exit(PATIENCE_SECONDS)
            commit(producer, topic, "1")
            before = sys.gettrace()
            sys.settrace(interrupted)
            try:
                commit(producer, topic, "interrupted")
            except KeyboardInterrupt:
                assert interrupted.where
            finally:
                sys.settrace(before)
            for n in range(2, 5):
                commit(producer, topic, str(n))
            producer.outgoing.flush_at_exit(PATIENCE_SECONDS)
        found = {message.text for message in frozen.messages(topic)}
        assert found >= set("01234"), interrupted.where
        if not interrupted.where:
            break
    assert at > 20, "the connections were not used"


def test_an_answer_to_something_else_is_not_taken(
    frozen: InMemoryServer, unique: str, by_loop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a proxy that mixes up whom it answers."""
    with TransactionProducer(frozen.url, group=unique) as producer:
        commit_and_settle(producer, frozen, unique, 0)
        foreign = (200, encode_msgpack(Items([Item(id=ids.to_text(ids.new_id()), status=200)])))
        assert producer.outgoing._blocking is not None
        monkeypatch.setattr(producer.outgoing._blocking._half_connection, "answer", lambda seconds: foreign)
        commit(producer, unique, "1")
        assert bodies(frozen, unique, 2) == ["0", "1"]
    assert by_loop == ["half", "COMMIT", "half"]


@pytest.mark.long
def test_a_handler_that_closes_the_producer_while_its_thread_sends(
    frozen: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler runs in the thread that has the connection: it would wait for itself."""
    monkeypatch.setattr(blocking, "TAKEN_SECONDS", 0.0)
    producer = TransactionProducer(frozen.url, group=unique)
    commit_and_settle(producer, frozen, unique, 0)
    send = blocking.BlockingConnection.send

    def handled(self: blocking.BlockingConnection, request: bytes) -> None:
        if OUTCOMES.encode() in request:
            monkeypatch.undo()
            producer.close()
        send(self, request)

    monkeypatch.setattr(blocking.BlockingConnection, "send", handled)
    commit(producer, unique, "1")
    assert bodies(frozen, unique, 2) == ["0", "1"]
