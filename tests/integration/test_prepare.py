"""A half without a database, from threads: prepared, settled by its sender, or asked back for."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

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


def listener(topic: str) -> CheckMessageListener:
    class Kept(CheckMessageListener):
        topics = (topic,)

        def check(self, half: HalfMessage) -> Outcome:
            return Outcome.COMMIT

    return Kept()


@pytest.fixture
def engine(sqlite_engine: sa.Engine) -> sa.Engine:
    return sqlite_engine


@pytest.mark.parametrize("has_engine", [False, True])
def test_an_undecided_transaction_is_checked(
    memory: InMemoryServer, unique: str, engine: sa.Engine, has_engine: bool
) -> None:
    """A producer with a database also answers for transactions that are not in it, before it has sent anything."""
    with TransactionProducer(memory.url, group=unique, engine=engine if has_engine else None) as producer:
        producer.add_check_listener(listener(unique))
        left = producer.prepare([Message(unique, "x")], check_after=0.5)
        memory.advance(1)
        path = f"transactions/{left.id}"
        eventually(lambda: admin(memory.url, "GET", path)["state"] == "COMMITTED", "the check")


def test_a_database_does_not_answer_for_a_transaction_that_is_not_in_it(
    memory: InMemoryServer, unique: str, engine: sa.Engine
) -> None:
    """The database has no row of it: the answer was a rollback, although nobody knows what became of it."""
    with TransactionProducer(memory.url, group=unique, engine=engine) as producer:
        producer.add_check_listener(listener(f"{unique}-other"))
        with Session(engine) as session, session.begin():
            producer.send(session, Message(unique, "in the database"))
        left = producer.prepare([Message(unique, "x")], check_after=0.5)
        memory.advance(1)
        shown = lambda: admin(memory.url, "GET", f"transactions/{left.id}")  # noqa: E731
        eventually(lambda: len(shown()["checks"]) > 1, "the answer to the check")  # first it is asked
        assert shown()["state"] == "PREPARED", shown()["checks"]
        assert shown()["source"] == ""  # so that nobody is told to look in a database
