"""A store in a database, and two databases of which each is a shard."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from notify.protocol import ids
from notify.protocol.wire import Payload, encode_msgpack
from notify.runtime.clock import wall_clock
from notify.storage.records import NewMessage, NewTransaction, State
from notify.storage.sql.store import SqlStore
from tests.support.databases import empty_database
from tests.support.servers import make_storage


def use(url: str, scenario: Callable[[SqlStore], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scenario with a store that is open, and close the store."""

    async def whole() -> None:
        store = SqlStore(url, **options)
        await store.open(wall_clock())
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(whole())


def put(url: str, transactions: Sequence[NewTransaction], outcomes: Sequence[tuple[bytes, str, State]] = ()) -> None:
    """Store transactions, and decide some."""

    async def scenario(store: SqlStore) -> None:
        await store.put(transactions, wall_clock())
        if outcomes:
            await store.decide(outcomes, wall_clock())

    use(url, scenario, writers=1)


def published(topic: str, *bodies: str, group: str = "") -> list[NewTransaction]:
    """A transaction of each body, committed from its beginning; without a group, as if no transaction had been asked
    for."""
    payloads = [encode_msgpack(Payload(topic, body.encode())) for body in bodies]
    return [NewTransaction(ids.new_id(), group, [NewMessage(topic, p)], committed=True) for p in payloads]


def put_in_every_state(url: str, topic: str, first: int = 0, **fields: str) -> list[int]:
    """Store forty transactions of two messages with the key "k", the tag "t" and a header. Ten come committed, ten are
    committed by an outcome, ten rolled back, and ten stay undecided. Returns the numbers of the committed messages."""

    def message(number: int) -> NewMessage:
        body = json.dumps({"n": number, **fields}).encode()
        return NewMessage(topic, encode_msgpack(Payload(topic, body, "k", "t", {"h": "ü"})), "k", "t")

    numbers = range(first, first + 40)
    at_once = numbers[30:]
    made = {
        n: NewTransaction(ids.new_id(), "g", [message(2 * n), message(2 * n + 1)], committed=n in at_once)
        for n in numbers
    }
    states = {n: (State.COMMITTED, State.ROLLED_BACK)[n % 3] for n in numbers[:30] if n % 3 < 2}
    put(url, list(made.values()), [(made[n].id, "g", state) for n, state in states.items()])
    committed = [*(n for n, state in states.items() if state is State.COMMITTED), *at_once]
    return [2 * n + part for n in committed for part in range(2)]


@contextlib.contextmanager
def two_shards(database_urls: Mapping[str, str], directory: Path) -> Iterator[tuple[str, str]]:
    """The URLs of the shards `a`, on PostgreSQL, and `b`, on MariaDB, both empty."""
    with (
        empty_database("postgresql", database_urls, directory) as a,
        empty_database("mariadb", database_urls, directory) as b,
    ):
        make_storage(a, "a")
        make_storage(b, "b")
        yield a, b
