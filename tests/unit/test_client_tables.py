"""The tables of a service: they are made, filled in bounded statements, and purged by answers to the question."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from notify.client.tables.creation import create_tables
from notify.client.tables.half_rows import MOST_BYTES, TOGETHER, _parts
from notify.client.tables.purge import _ask
from notify.errors import Unavailable
from notify.protocol.wire import Item, Items, encode_msgpack
from tests.support.transactions import new_id


class Answering:
    """Stands for the servers: each request gets the same answer."""

    def __init__(self, *items: Item) -> None:
        self._answer = encode_msgpack(Items(list(items)))
        self.closed = 0

    async def known(self, seconds: float) -> None:
        pass

    def places(self) -> tuple[str, ...]:
        return ()

    async def call(self, *_: Any, **__: Any) -> bytes:
        return self._answer

    def close_idle(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("shard", ["main", ""], ids=["by outcomes", "by states"])
def test_an_answer_about_other_transactions_says_nothing(shard: str) -> None:
    asked, other = new_id(), new_id()
    answering: Any = Answering(Item(other, 200, "COMMITTED"))
    with pytest.raises(Unavailable, match=f"{asked} belongs to {other}"):
        asyncio.run(_ask(answering, "g", shard, [asked]))
    assert answering.closed == 1


def test_a_statement_ends_at_a_number_of_rows_and_of_bytes() -> None:
    """Sixteen large bodies were one packet, above the server's max_allowed_packet."""
    sizes = [10] * (TOGETHER + 1) + [MOST_BYTES + 1, MOST_BYTES, MOST_BYTES - 5, 5, 1]
    parts = list(_parts([{"body": bytes(size)} for size in sizes] + [{}]))
    assert [len(part) for part in parts] == [TOGETHER, 1, 1, 1, 2, 2]
    assert list(_parts([])) == []


def test_a_view_in_the_place_of_a_table_stays() -> None:
    engine = sa.create_engine("sqlite://")
    source = create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE notify_refused RENAME TO elsewhere")
        connection.exec_driver_sql("CREATE VIEW notify_refused AS SELECT * FROM elsewhere")
    assert create_tables(engine) == source
    engine.dispose()
