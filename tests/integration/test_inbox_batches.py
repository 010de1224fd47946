"""A batch in the inbox: its claims and effects are one transaction, on each database; what took effect is left out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Inbox, ReceivedMessage, create_tables
from notify.client.inbox.rows import ASKED_AT_ONCE
from notify.client.tables.definitions import notify_inbox
from notify.errors import InvalidRequest
from notify.protocol.message import FIRST_ID
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import empty_database
from tests.support.shop import Base, Order

TRANSACTION = "01a1fc5e-3817-71f6-bdb9-9ebd1a8e445d"


def message(number: int, **changed: Any) -> ReceivedMessage:
    name = f"{TRANSACTION}.{number}"
    plain = ReceivedMessage(name, "t", 0, number, f"{number:04}".encode(), None, None, {}, 1, "")
    return replace(plain, **changed)


def again(number: int, of: int) -> ReceivedMessage:
    """A message that is sent again under a new id."""
    return message(number, headers={FIRST_ID: f"{TRANSACTION}.{of}"})


class Effects:
    """A handler that orders an item for each message, under the test's own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[list[str]] = []

    def __call__(self, messages: list[ReceivedMessage], session: Session) -> None:
        self.calls.append([m.text for m in messages])
        session.add_all([Order(item=f"{self.name} {m.text}") for m in messages])
        session.flush()

    def committed(self, engine: sa.Engine) -> list[str]:
        with Session(engine) as session:
            named = session.scalars(sa.select(Order.item).where(Order.item.startswith(self.name)))
            return sorted(item.rpartition(" ")[2] for item in named)


def rows(engine: sa.Engine, group: str) -> int:
    """How many inbox rows a group has."""
    with engine.connect() as connection:
        own = notify_inbox.c.consumer_group == group
        return connection.scalar(sa.select(sa.func.count()).select_from(notify_inbox).where(own)) or 0


@pytest.mark.long
def test_a_batch_takes_effect_once(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)
    size = ASKED_AT_ONCE + 1
    batch = [message(n) for n in range(size)]
    assert inbox.run_batch(unique, batch, effects) == size
    assert inbox.run_batch(unique, batch, effects) == 0
    assert inbox.run_batch(unique, [*batch[:3], message(size), *batch[3:5], message(size + 1)], effects) == 2
    assert [len(call) for call in effects.calls] == [size, 2], "nothing to handle is no call"
    assert effects.committed(shared_engine) == [f"{n:04}" for n in range(size + 2)]
    assert rows(shared_engine, unique) == size + 2


def test_single_messages_and_batches_know_each_other(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)
    assert inbox.run(unique, message(1), lambda m, session: effects([m], session))
    assert inbox.run_batch(unique, [message(0), message(1), message(2)], effects) == 2
    assert not inbox.run(unique, message(2), lambda m, session: effects([m], session))
    assert effects.committed(shared_engine) == ["0000", "0001", "0002"]


def test_a_batch_that_fails_leaves_nothing(shared_engine: sa.Engine, unique: str) -> None:
    inbox, effects = Inbox(shared_engine), Effects(unique)

    def fail(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        raise ValueError("after its effect")

    def commit(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        session.commit()

    with pytest.raises(ValueError, match="after its effect"):
        inbox.run_batch(unique, [message(0), message(1)], fail)
    with pytest.raises(InvalidRequest, match="must not commit"):
        inbox.run_batch(unique, [message(0), message(1)], commit)
    assert rows(shared_engine, unique) == 0 and effects.committed(shared_engine) == []


def test_a_message_twice_in_a_batch_is_handled_once(shared_engine: sa.Engine, unique: str) -> None:
    """The same message, or one that was dead beside itself under its new id; other replays are other effects."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    batch = [message(0), message(0), again(7, of=0), again(8, of=3), message(3), message(0, replay=1)]
    assert inbox.run_batch(unique, batch, effects) == 3
    assert effects.calls == [["0000", "0008", "0000"]]
    assert rows(shared_engine, unique) == 5, "0, 7, 8, 3, and the replay of 0: an audit counts each id's effect"
    assert inbox.run_batch(unique, batch, effects) == 0


def test_an_effect_that_stands_under_either_id_stands(shared_engine: sa.Engine, unique: str) -> None:
    """Also where a row has been purged, or was inserted by a version that knew one id."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    assert inbox.run_batch(unique, [message(3), message(7)], effects) == 2
    for one in (again(7, of=0), again(8, of=3)):
        assert not inbox.run(unique, one, lambda m, session: effects([m], session))
    assert inbox.run_batch(unique, [again(7, of=1), again(9, of=3)], effects) == 0
    assert effects.committed(shared_engine) == ["0003", "0007"]


def test_two_transactions_with_the_same_messages(shared_engine: sa.Engine, unique: str) -> None:
    """The second waits for the first, and handles what that one has not."""
    inbox, effects = Inbox(shared_engine), Effects(unique)
    has_claimed, may_end = threading.Event(), threading.Event()

    def slow(messages: list[ReceivedMessage], session: Session) -> None:
        effects(messages, session)
        has_claimed.set()
        assert may_end.wait(PATIENCE_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(inbox.run_batch, unique, [message(n) for n in (1, 2, 3)], slow)
        assert has_claimed.wait(PATIENCE_SECONDS)
        second = pool.submit(inbox.run_batch, unique, [message(n) for n in (4, 3, 2, 0)], effects)
        assert not second.done()
        may_end.set()
        assert (first.result(PATIENCE_SECONDS), second.result(PATIENCE_SECONDS)) == (3, 2)
    assert effects.calls == [["0001", "0002", "0003"], ["0004", "0000"]]
    assert effects.committed(shared_engine) == [f"{n:04}" for n in range(5)]


@pytest.mark.parametrize("kind", ["mariadb", "mysql"])
def test_a_claim_that_is_seen_and_not_committed_is_no_effect(
    kind: str, database_urls: Mapping[str, str], tmp_path: Path, unique: str
) -> None:
    """At READ UNCOMMITTED a consumer sees the claim of another one, whose handler then fails."""
    with empty_database(kind, database_urls, tmp_path) as url:
        engine = sa.create_engine(url, isolation_level="READ UNCOMMITTED")
        create_tables(engine)
        Base.metadata.create_all(engine)
        inbox, effects = Inbox(engine), Effects(unique)
        has_claimed, may_fail = threading.Event(), threading.Event()

        def fail(messages: list[ReceivedMessage], session: Session) -> None:
            has_claimed.set()
            assert may_fail.wait(PATIENCE_SECONDS)
            raise ValueError("after the other one has looked")

        @sa.event.listens_for(engine, "after_cursor_execute")
        def looked(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            if has_claimed.is_set() and statement.startswith("SELECT") and "notify_inbox" in statement:
                may_fail.set()

        assert inbox.run_batch(unique, [message(0)], effects) == 1
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(inbox.run_batch, unique, [message(1)], fail)
            assert has_claimed.wait(PATIENCE_SECONDS)
            assert inbox.run_batch(unique, [message(0), message(1)], effects) == 1
            with pytest.raises(ValueError, match="has looked"):
                first.result(PATIENCE_SECONDS)
        assert effects.committed(engine) == ["0000", "0001"]
        engine.dispose()
