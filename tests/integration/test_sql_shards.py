"""SQL storage over several databases: which one takes a transaction, and what one that fails holds up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from notify.clock import wall_clock as now
from notify.errors import Unavailable
from notify.storage.records import NewTransaction, PartlyStored, Put, State
from notify.storage.sql.key_map import KeyMap
from notify.storage.sql.shards import SqlShards, open_storage
from tests.support.clock import eventually_async
from tests.support.proxy import Proxy
from tests.support.sql_storage import two_shards
from tests.support.transactions import sent

pytestmark = pytest.mark.usefixtures("patient_writers")


@pytest.mark.usefixtures("impatient_writers")
def test_a_shard_that_fails_is_left_out_and_comes_back(database_urls: dict[str, str], tmp_path: Path) -> None:
    with two_shards(database_urls, tmp_path) as (a, b):
        behind = sa.make_url(b)
        proxy = Proxy(behind.host or "", behind.port or 0)
        through = behind.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)

        async def run() -> None:
            store = open_storage(f"a={a} b={through}", "main", retention_us=0, writers=1)
            assert isinstance(store, SqlShards)
            await store.open(now())
            used = {(await store.put([sent()], now()))[0].shard for _ in range(40)}
            assert used == {"a", "b"}
            t = sent()
            shard = (await store.put([t], now()))[0].shard
            other = "b" if shard == "a" else "a"
            wrong = await store.decide([(t.id, "g", State.COMMITTED)], now(), shards={t.id: other})
            assert not wrong[0].found, "an outcome goes to its shard only"
            assert (await store.decide([(t.id, "g", State.COMMITTED)], now()))[0].changed, (
                "without a shard it goes to all"
            )
            places = {p.shard: some.id for some in [sent() for _ in range(40)] for p in await store.put([some], now())}
            here, elsewhere = places["a"], places["b"]
            keyed = sent(key="some key")
            home = store.shard_of(keyed)
            assert {(await store.put([sent(key="some key")], now()))[0].shard for _ in range(10)} == {home}

            def place(key: str) -> str | None:
                return store.shard_of(sent(key=key))

            # Database b goes away: messages without a key go to a; those with a key of b are refused.
            proxy.close()
            for _ in range(20):
                try:
                    result = (await store.put([sent()], now()))[0]
                except Unavailable:
                    continue
                assert result.shard == "a"
            assert [s.shard for s in store.healthy()] == ["a"]
            refused = next(sent(key=f"k{n}") for n in range(100) if store.shard_of(sent(key=f"k{n}")) == "b")
            with pytest.raises(Unavailable):
                await store.put([refused], now())
            with pytest.raises(PartlyStored) as partly:
                await store.put(
                    [refused, sent(), sent(key=next(k for k in map(str, range(99)) if place(k) == "a"))], now()
                )
            assert [isinstance(r, Unavailable) for r in partly.value.results] == [True, False, False]
            for asked in (store.states([t.id]), store.transaction(elsewhere), store.checking(elsewhere),
                          store.resume_checks(elsewhere, now(), anew=True)):  # fmt: skip
                with pytest.raises(Unavailable):
                    await asked
            assert await store.transaction(here) is not None
            # Database b comes back.
            proxy.reopen()

            def is_back() -> bool:
                store.tend(now())  # every tick of a server does this
                return len(store.healthy()) == 2

            await eventually_async(is_back, "database b to be used again")
            assert {(await store.put([sent()], now()))[0].shard for _ in range(40)} == {"a", "b"}
            # A new version of the key map moves keys.
            store.follow(KeyMap(1, ("b", "a")))
            assert store.shard_of(sent(key="some key")) != home
            await store.close()

        asyncio.run(run())
        proxy.close()


def test_the_same_id_is_stored_once_whoever_is_asked(database_urls: dict[str, str], tmp_path: Path) -> None:
    """A repeated `publish` at another server goes to the same shard. A random shard stored it a second time."""
    with two_shards(database_urls, tmp_path) as (a, b):

        async def run() -> None:
            servers = [
                open_storage(text, "main", retention_us=0, writers=1) for text in (f"a={a} b={b}", f"b={b} a={a}")
            ]
            for server in servers:
                await server.open(now())
            published = [sent(group="", committed=True) for _ in range(20)]
            first = await servers[0].put(published, now())
            assert {r.put for r in first} == {Put.STORED}
            assert {r.shard for r in first} == {"a", "b"}
            for server in (*servers, *servers):
                again = await server.put(published, now())
                assert {r.put for r in again} == {Put.ALREADY}
                assert [r.shard for r in again] == [r.shard for r in first]
            others = [NewTransaction(t.id, "", sent(b"other").messages, committed=True) for t in published]
            assert {r.put for r in await servers[1].put(others, now())} == {Put.IN_USE}
            for server in servers:
                await server.close()

        asyncio.run(run())
