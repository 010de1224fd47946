"""Calls of a producer of transactions end in time, with what Kafka's client says or with our own error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError, KafkaException

from notify.kafka import transactional
from notify.kafka.exchange import Exchange
from notify.kafka.groups import transactional_id
from notify.kafka.transactional import TransactionalProducer
from tests.support.clock import PATIENCE_SECONDS

CALLS: dict[str, Callable[[Any], None]] = {
    "init_transactions": lambda producer: producer.init_transactions(0.01),
    "send_offsets_to_transaction": lambda producer: producer.send_offsets_to_transaction([], None, 0.01),
    "commit_transaction": lambda producer: producer.commit_transaction(0.01),
    "abort_transaction": lambda producer: producer.abort_transaction(0.01),
}


class Client:
    """In place of Kafka's client: notes its calls, does what `then` says in one of them, and has a call of its own."""

    def __init__(self, call: str, then: Callable[[], None]) -> None:
        self.calls: list[str] = []
        self._call, self._then = call, then

    def poll(self, seconds: float) -> None:
        """Has nothing to say."""

    def __getattr__(self, name: str) -> Callable[..., str]:
        def called(*given: Any) -> str:
            self.calls.append(name)
            if name == self._call:
                self._then()
            return name

        return called


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(transactional, "MORE_SECONDS", 0.01)
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_hangs_fails_in_time_and_each_later_one_at_once(call: str, goes_on: threading.Event) -> None:
    client = Client(call, goes_on.wait)  # type: ignore[arg-type]
    producer: Any = TransactionalProducer(client, Exchange({}))  # type: ignore[arg-type]
    with pytest.raises(KafkaException, match="hangs in a transaction") as raised:
        CALLS[call](producer)
    assert raised.value.args[0].code() == KafkaError._TIMED_OUT
    for later in CALLS.values():
        with pytest.raises(KafkaException, match="hangs in a transaction"):
            later(producer)
    assert client.calls == [call]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_client_is_raised(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = KafkaException(KafkaError(KafkaError._FENCED))

    def fails() -> None:
        raise fenced

    monkeypatch.setattr(transactional, "MORE_SECONDS", PATIENCE_SECONDS)
    client = Client(call, fails)
    producer: Any = TransactionalProducer(client, Exchange({}))  # type: ignore[arg-type]
    with pytest.raises(KafkaException) as raised:
        CALLS[call](producer)
    assert raised.value is fenced
    producer.begin_transaction()
    assert client.calls == [call, "begin_transaction"]


def test_a_call_that_the_process_slept_through_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds all of the time over, though the call would end at once."""
    monkeypatch.setattr(transactional, "MORE_SECONDS", PATIENCE_SECONDS)
    ends = threading.Event()
    threading.Timer(0.1, ends.set).start()
    client: Any = Client("commit_transaction", lambda: assert_set(ends))
    producer = TransactionalProducer(client, Exchange({}))
    producer.commit_transaction(0.0)


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_SECONDS)


def test_no_two_groups_and_instances_have_one_transactional_id() -> None:
    """A group `a-b` with instance `c` fenced group `a` with instance `b-c`, and a group `control` the servers."""
    owners = [transactional_id(name) for name in ("control", "redrive-a", "bridge-shop", "a", "a-b")]
    members = [transactional_id("a", "b-c"), transactional_id("a-b", "c"), transactional_id("a@b", "c")]
    assert len({*owners, *members}) == len(owners) + len(members)
    others = ("notify-control", "notify-redrive-a", "notify-bridge-shop", "notify-delays")
    assert not set(owners) & set(others)
