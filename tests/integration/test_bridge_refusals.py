"""A message that no queue takes goes to the source's list of refused messages, and the bridge goes on."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from notify import ids
from notify.binlog_bridge.pump import Bridge
from notify.client.table import half_message, notify_refused
from notify.limits import LIMITS
from notify.refused import retry
from notify.testing.process import ServerProcess
from tests.support.bridges import move, numbers, outbox
from tests.support.clock import eventually, eventually_async
from tests.support.groups import subscribe
from tests.support.http import admin


@pytest.fixture
def url(binlog_url: str) -> str:
    return binlog_url


def test_a_message_that_no_queue_takes_is_listed_and_sent_when_somebody_says_so(
    url: str, server: ServerProcess, unique: str
) -> None:
    subscribe(server.url, unique, unique)
    outbox(url, unique, range(1))
    engine = sa.create_engine(url)
    rows = half_message.c
    with engine.begin() as connection:
        row = dict(connection.execute(sa.select(half_message)).mappings().one())
        bad = row | {"transaction_id": ids.to_text(ids.new_id()), "topic": "no such topic", "body": b'{"n": 7}'}
        connection.execute(half_message.insert().values(bad))
        large = ids.to_text(ids.new_id())
        part = b"x" * (LIMITS.message_bytes - 1)
        for number in range(LIMITS.request_bytes // len(part) + 1):
            connection.execute(
                half_message.insert().values(row | {"transaction_id": large, "message_no": number, "body": part})
            )
    outbox(url, unique, range(1, 3))
    bridge = move(url, server)
    assert bridge.totals.refused == 2 and bridge.totals.stored == 3
    with engine.begin() as connection:
        listed = {r.transaction_id: r for r in connection.execute(sa.select(notify_refused))}
        assert {name: r.code for name, r in listed.items()} == {
            bad["transaction_id"]: "invalid_name",
            large: "request_too_large",
        }
        assert {r.mover for r in listed.values()} == {f"bridge-{bridge.name}"}
        marked = connection.scalars(sa.select(rows.transaction_id).where(rows.relayed == 2, rows.message_no == 0))
        assert set(marked) == set(listed)
        # The row is corrected in the table, and tried again.
        connection.execute(
            half_message.update().where(rows.transaction_id == bad["transaction_id"]).values(topic=unique)
        )
        assert retry(connection, [bad["transaction_id"]], "its topic is right now") == [bad["transaction_id"]]

    def listed_now() -> int:
        with engine.connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(notify_refused)) or 0)

    def is_shown() -> bool:
        """The queue server shows the one that is left."""
        waiting = {row["source"]: row["waiting"] for row in admin(server.url, "GET", "refused")["sources"]}
        return waiting.get(bridge.name) == 1

    async def run() -> None:
        again = Bridge([url], server.url)
        task = asyncio.ensure_future(again.run())
        await eventually_async(lambda: listed_now() == 1 or task.done(), "the message to be sent, and leave the list")
        await asyncio.to_thread(eventually, is_shown, "the bridge to tell the server")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert sorted(numbers(server, unique, 4)) == [0, 1, 2, 7]
    with engine.connect() as connection:
        (left,) = connection.execute(sa.select(notify_refused)).all()
        assert left.transaction_id == large
    engine.dispose()
