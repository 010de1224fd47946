"""A purge believes an answer only where it is the one to its question."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
