"""The list of refused messages, on each database: entries are added, tried again, dropped, and kept by a purge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message, notify_refused
from notify.client.tables.purge import purge_by_force
from notify.errors import InvalidRequest
from notify.movers import refused
from notify.movers.outbox import LOCAL
from notify.movers.refused import DROPPED_STATE, RETRY, WAITING, Refusal
from notify.protocol.wire import Item
from notify.runtime.databases import DROPPED, REFUSED, RELAYED
from tests.support.shop import make_engine


@pytest.fixture
def engine(engine_url: str) -> Iterator[sa.Engine]:
    """A database whose outbox has three transactions that the target refused, all on the list."""
    engine = make_engine(engine_url)
    create_tables(engine)
    with TransactionProducer("http://127.0.0.1:9", group="g", engine=engine, mode="outbox") as producer:
        for n in range(3):
            with Session(engine) as session, session.begin():
                producer.send(session, Message("t", str(n), key="k"))
    with engine.begin() as connection:
        names = [place.id for place in LOCAL.oldest(connection, 10)]
        LOCAL.mark(connection, names, REFUSED)
        for t in LOCAL.read(connection, names):
            item = Item(t.id, 413, code="too_large", detail="x" * 5000)
            refused.note(connection, "relay-1", [Refusal.of(t, item)])
    yield engine
    engine.dispose()


def states(engine: sa.Engine) -> list[tuple[str, int, int]]:
    """(state on the list, tries, `relayed` of the row), by id."""
    with engine.connect() as connection:
        rows = refused.listed(connection)
        relayed = dict(connection.execute(sa.select(half_message.c.transaction_id, half_message.c.relayed)).all())
        return [(row["state"], row["tries"], relayed[row["transaction_id"]]) for row in rows]


def names(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return [row["transaction_id"] for row in refused.listed(connection)]


def test_a_refused_transaction_is_listed_with_its_reason(engine: sa.Engine) -> None:
    first, *others = names(engine)
    with engine.begin() as connection:
        assert refused.count(connection) == 3
        row = refused.listed(connection, limit=1)[0]
        assert (row["transaction_id"], row["topic"], row["code"], row["status"]) == (first, "t", "too_large", 413)
        assert 100 < len(row["detail"]) < 5000 and row["mover"] == "relay-1" and row["refused_at"] is not None
        assert [r["transaction_id"] for r in refused.listed(connection, after=first)] == others
        refused.note(connection, "relay-2", [Refusal(first, "g", "t", 1, 422, "invalid", "other")])
    assert states(engine) == [(WAITING, 2, REFUSED), (WAITING, 1, REFUSED), (WAITING, 1, REFUSED)]


def test_one_is_tried_again_and_leaves_the_list_when_it_is_sent(engine: sa.Engine) -> None:
    first, second, third = names(engine)
    with engine.begin() as connection:
        assert refused.retry(connection, [first, second, "unknown"], "the topic is made") == [first, second]
        assert refused.retry(connection, [first], "again") == []
        assert refused.to_retry(connection) == [first, second]
        assert [place.id for place in LOCAL.oldest(connection, 10)] == [first, second]
    assert states(engine) == [(RETRY, 1, 0), (RETRY, 1, 0), (WAITING, 1, REFUSED)]
    with engine.begin() as connection:
        LOCAL.mark(connection, [first], RELAYED)
        refused.tidy(connection, LOCAL)
    assert names(engine) == [second, third]


def test_one_is_dropped_with_a_reason_which_may_be_taken_back(engine: sa.Engine) -> None:
    first, second, _ = names(engine)
    with engine.begin() as connection:
        with pytest.raises(InvalidRequest, match="reason"):
            refused.drop(connection, [first], " ")
        assert refused.drop(connection, [first, second], "sent by hand") == [first, second]
        assert refused.count(connection) == 1
        (row, _) = refused.listed(connection, state=DROPPED_STATE)
        assert row["reason"] == "sent by hand"
        assert LOCAL.oldest(connection, 10) == []
        assert refused.retry(connection, [second], "after all") == [second]
    assert states(engine) == [(DROPPED_STATE, 1, DROPPED), (RETRY, 1, 0), (WAITING, 1, REFUSED)]


def test_a_dropped_transaction_stays_dropped_after_a_late_answer(engine: sa.Engine) -> None:
    """A mover may hold a transaction while a person drops it. It marked the row as sent, or put it back on the list.

    A row that was to be tried again and then was dropped stayed unsent: a relay sent it.
    """
    first, second, third = names(engine)
    with engine.begin() as connection:
        transactions = LOCAL.read(connection, [first, second, third])
        assert refused.retry(connection, [first, second, third], "the topic is back") == [first, second, third]
        refused.drop(connection, [first, second], "it was wrong")
    with engine.begin() as connection:
        LOCAL.mark(connection, [first, third], RELAYED)
        refused.taken(connection, [first, third])
        LOCAL.mark(connection, [second], REFUSED)
        again = Item(second, 413, code="too_large", detail="again")
        refused.note(connection, "relay-1", [Refusal.of(transactions[1], again)])
    assert names(engine) == [first, second]
    assert states(engine) == [(DROPPED_STATE, 1, DROPPED), (DROPPED_STATE, 1, DROPPED)]


def test_a_purge_keeps_what_waits_on_the_list(engine: sa.Engine) -> None:
    first, *others = names(engine)
    with engine.begin() as connection:
        refused.drop(connection, [first], "sent by hand")
    assert purge_by_force(engine, older_than=-3600).rows == 1
    with engine.connect() as connection:
        assert sorted(connection.scalars(sa.select(half_message.c.transaction_id))) == others


def test_the_list_is_made_where_it_is_missing(engine: sa.Engine) -> None:
    """A database with an earlier version's tables gets the list."""
    notify_refused.drop(engine)
    assert refused.ensure(engine) and refused.ensure(engine)
    with engine.connect() as connection:
        assert refused.count(connection) == 0
