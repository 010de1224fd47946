"""A consumer's inbox is kept whatever its database, or its engine's pool, does meanwhile."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from notify.client import Inbox, create_tables, use_explicit_begin
from notify.client.consumer import inbox_maintenance
from notify.client.consumer.inbox_maintenance import InboxMaintenance
from notify.client.consumer.session import Work
from notify.client.handling.hand import Hand
from notify.client.inbox import inbox
from notify.client.tables.definitions import notify_inbox
from notify.client.tables.old_rows import DAY
from notify.errors import InvalidRequest
from tests.support.clock import eventually_async

FAILURES = [
    sa.exc.TimeoutError("QueuePool limit of size 5 overflow 10 reached, connection timed out, timeout 30.00"),
    ConnectionRefusedError("an asyncio driver's, which SQLAlchemy does not wrap"),
    sa.exc.InterfaceError("SELECT 1", None, Exception("the connection is closed")),
]


class Failing:
    """Asks the inbox's database: once it raises each of the failures, then it answers."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.calls = 0

    async def __call__(self, _: Inbox, function: Any, *arguments: Any) -> Any:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return datetime(2026, 1, 1, tzinfo=UTC) if function is inbox.whole_from else None


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INBOX_LOOK_SECONDS", "INBOX_WAIT_SECONDS", "INBOX_WAIT_MAX_SECONDS"):
        monkeypatch.setattr(inbox_maintenance, name, 0.001)


async def test_a_consumer_waits_for_its_inboxs_database() -> None:
    ask = Failing(*FAILURES)
    await InboxMaintenance(Inbox(sa.create_engine("sqlite://")), ask).until_good(asyncio.Event())
    assert ask.calls == len(FAILURES) + 1


async def test_an_inbox_is_kept_after_a_failure() -> None:
    """The first failure that is not the driver's ended it: the inbox was never purged again, and the servers were not
    told of other processes' purges."""
    work = Work("g", "i", {}, Hand(lambda: None, lambda messages, error: None, 1, 1), 30, 1)
    ask = Failing(*FAILURES, RuntimeError("a fault of an engine's listener"))
    running = asyncio.ensure_future(InboxMaintenance(Inbox(sa.create_engine("sqlite://")), ask).run(work, {}))
    await eventually_async(lambda: running.done() or work.inbox_from is not None, "the inbox's age to be read")
    assert not running.done()
    running.cancel()


async def test_an_inbox_of_coroutines_is_purged_by_a_coroutine(tmp_path: Path) -> None:
    """`purge` failed with SQLAlchemy's MissingGreenlet, and left a connection in its transaction."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    use_explicit_begin(engine)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(create_tables)
            row = {"consumer_group": "g", "created_at": datetime(2026, 1, 1)}
            await connection.execute(notify_inbox.insert(), [row | {"message_id": f"m{n}"} for n in range(5)])
        with pytest.raises(InvalidRequest, match="purge_async"):
            Inbox(engine).purge(DAY)
        assert await Inbox(engine).purge_async(DAY, batch=2) == 5
        since = await Inbox(engine).call_async(inbox.whole_from)
        assert since > datetime(2026, 1, 1, tzinfo=UTC)
    finally:
        await engine.dispose()


def test_a_purge_of_batches_without_rows_is_refused() -> None:
    """It continued for ever."""
    with pytest.raises(InvalidRequest, match="batch"):
        Inbox(sa.create_engine("sqlite://")).purge(DAY, batch=0)
