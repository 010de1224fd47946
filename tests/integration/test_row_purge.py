"""Purging half_message rows: a commit whose row is gone is never taken for a rollback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from notify import ids
from notify.check import CheckUnavailable, HalfMessage, LocalTransactionCheck, Outcome, local
from notify.check.question import read_source
from notify.client.purge import purge, purge_by_force
from notify.client.table import half_message, notify_source
from notify.testing import InMemoryServer

HOUR = 3600.0


@pytest.fixture
def engine(emptied_shop: sa.Engine) -> Iterator[sa.Engine]:
    """A database without rows; what its notify_source says is put right again."""
    with emptied_shop.connect() as connection:
        source = dict(connection.execute(sa.select(notify_source)).mappings().one())
    yield emptied_shop
    with emptied_shop.begin() as connection:
        connection.execute(notify_source.update().values(source))


def id_of(seconds_ago: float) -> str:
    """The id of a transaction that a producer's clock put so far back."""
    made_ms = round((time.time() - seconds_ago) * 1000)
    return ids.to_text(made_ms.to_bytes(6) + ids.new_id()[6:])


def commit_row(engine: sa.Engine, transaction_id: str, seconds_ago: float, shards: str = "main") -> HalfMessage:
    """A row that was committed so long ago by the database's clock; the half that a server would ask about."""
    values: dict[str, Any] = {
        "transaction_id": transaction_id, "message_no": 0, "producer_group": "g", "mode": "half", "state": "COMMITTED",
        "shards": shards, "topic": "t", "relayed": 1,
        "created_at": datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=seconds_ago),
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(half_message.insert().values(values))
        return HalfMessage(transaction_id, "g", "main", read_source(connection)[0], 1, ())


def rows(engine: sa.Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(sa.select(half_message.c.transaction_id)))


def test_a_forced_purge_knows_ids_of_a_clock_that_is_ahead(engine: sa.Engine) -> None:
    """The producer's clock was five minutes ahead of the database's when it made the id."""
    half = commit_row(engine, id_of(HOUR - 300), HOUR)
    assert purge_by_force(engine, older_than=HOUR - 60).rows == 1
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)
    assert rows(engine) == set()  # no tombstone either


def test_what_stands_after_a_forced_purge_is_answered(engine: sa.Engine) -> None:
    gone = commit_row(engine, id_of(HOUR), 2 * HOUR)
    kept = commit_row(engine, id_of(2 * HOUR), HOUR / 2)  # of a producer whose clock is behind
    later = HalfMessage(id_of(0), "g", "main", gone.source, 1, ())
    assert purge_by_force(engine, older_than=HOUR).rows == 1
    assert LocalTransactionCheck(engine).check(kept) is Outcome.COMMIT
    assert LocalTransactionCheck(engine).check(later) is Outcome.ROLLBACK
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(gone)


def test_a_purge_between_the_parts_of_a_question(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    half = commit_row(engine, id_of(2 * HOUR), 2 * HOUR)

    def read_then_purge(connection: sa.Connection) -> tuple[str, int]:
        there = read_source(connection)
        connection.rollback()
        purge_by_force(engine, older_than=HOUR)
        return there

    monkeypatch.setattr(local, "read_source", read_then_purge)
    with pytest.raises(CheckUnavailable, match="purged"):
        LocalTransactionCheck(engine).check(half)
    assert rows(engine) == set()


def test_a_row_is_asked_for_at_its_own_shard(engine: sa.Engine, memory: InMemoryServer) -> None:
    """This server has the shard `main` only: what it does not know of another one, says nothing."""
    ours, theirs, both = (id_of(10 * HOUR + n) for n in range(3))
    for transaction_id, shards in ((ours, "main"), (theirs, "elsewhere"), (both, "main,elsewhere")):
        commit_row(engine, transaction_id, 10 * HOUR, shards)
    result = asyncio.run(purge(engine, memory.url, older_than=HOUR, ids_retention=2 * HOUR))
    assert (result.looked_at, result.rows, result.kept) == (3, 1, 2)
    assert rows(engine) == {theirs, both}


def test_the_ids_retention_counts_by_the_databases_clock(engine: sa.Engine, memory: InMemoryServer) -> None:
    """An id that says a time within ten minutes of the retention's end may be younger than it says."""
    old, young = id_of(2 * HOUR + 900), id_of(2 * HOUR + 300)
    for transaction_id in (old, young):
        commit_row(engine, transaction_id, 3 * HOUR)
    result = asyncio.run(purge(engine, memory.url, older_than=HOUR, ids_retention=2 * HOUR))
    assert (result.rows, result.kept) == (1, 1)
    assert rows(engine) == {young}
