"""A half without a database, from threads: prepared, settled by its sender, or asked back for."""

from __future__ import annotations

import pytest

from notify.check import CheckMessageListener, HalfMessage, Outcome
from notify.client import Message, TransactionProducer
from notify.errors import InvalidRequest, OutcomeConflict
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.groups import bodies, drain, subscribe
from tests.support.http import admin


def test_a_thread_prepares_and_settles(memory: InMemoryServer, unique: str) -> None:
    subscribe(memory.url, unique, unique)
    with TransactionProducer(memory.url, group=unique) as producer:
        kept = producer.prepare([Message(unique, "a"), Message(unique, "b")])
        dropped = producer.prepare([Message(unique, "c")])
        assert kept.commit() == "COMMITTED" == kept.commit()
        assert dropped.rollback() == "ROLLED_BACK"
        with pytest.raises(OutcomeConflict):
            dropped.commit()
        with pytest.raises(InvalidRequest, match="check_after"):
            producer.prepare([Message(unique, "d")], check_after=0.1)
    assert bodies(drain(memory.url, unique, unique, 2)) == ["a", "b"]


def test_what_is_left_undecided_is_asked_back(memory: InMemoryServer, unique: str) -> None:
    class Kept(CheckMessageListener):
        topics = (unique,)

        def check(self, half: HalfMessage) -> Outcome:
            return Outcome.COMMIT

    with TransactionProducer(memory.url, group=unique) as producer:
        producer.add_check_listener(Kept())
        left = producer.prepare([Message(unique, "x")], check_after=0.5)
        memory.advance(1)
        path = f"transactions/{left.id}"
        eventually(lambda: admin(memory.url, "GET", path)["state"] == "COMMITTED", "the check")
