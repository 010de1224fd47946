"""SQL storage over several databases: which one takes a transaction, and what one that fails holds up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from notify.check.schedule import CheckSchedule
from notify.errors import Unavailable
from notify.protocol import ids
from notify.protocol.wire import OutcomeItem
from notify.runtime.clock import wall_clock as now
from notify.server import webhooks
from notify.server.core.check_log import CheckLog
from notify.server.core.check_webhooks import CheckWebhooks
from notify.server.core.outcomes import Outcomes
from notify.server.metrics import Metrics
from notify.server.settings import Settings
from notify.storage.records import NewTransaction, PartlyStored, Put, State
from notify.storage.sql.checks import LOOK_EVERY_US
from notify.storage.sql.key_map import KeyMap
from notify.storage.sql.shards import SqlShards, open_storage
from notify.storage.sql.tables import server_half_message
from tests.support.clock import eventually_async
from tests.support.proxy import Proxy
from tests.support.sql_storage import two_shards
from tests.support.transactions import sent

pytestmark = pytest.mark.usefixtures("patient_writers")


@pytest.mark.long
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
                          store.resume_checks(elsewhere, now(), reset=True)):  # fmt: skip
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


@pytest.mark.long
def test_an_id_is_stored_once_whichever_server_is_asked(database_urls: dict[str, str], tmp_path: Path) -> None:
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


def test_a_half_on_two_shards_is_decided_on_each_by_its_own_outcome(tmp_path: Path) -> None:
    """Its producer commits it on one, and says ROLLBACK to the other's check. In one request both went to the second,
    which was committed, too; what a webhook said went to all shards, or to none while one was unreachable."""

    async def run() -> None:
        places = {name: f"sqlite:///{tmp_path}/{name}.db" for name in "ab"}
        store = open_storage(" ".join(f"{n}={url}" for n, url in places.items()), "main", retention_us=0, writers=1)
        await store.open(now())
        outcomes = Outcomes(store, now, shard="main", schedule=CheckSchedule(), metrics=Metrics(), check_log=CheckLog())
        t = sent(check_after_us=0)
        for name in places:
            await store.by_name[name].put([t], now())
        due = {d.shard: d for d in await store.claim_checks("g", now() + 1, 10, 60_000_000)}
        name = ids.to_text(t.id)
        commit = OutcomeItem(id=name, outcome="COMMIT", shard="a")
        rollback = OutcomeItem(id=name, outcome="ROLLBACK", shard="b", check=str(due["b"].token))
        assert [item.status for item in await outcomes.record("g", [commit, rollback])] == [200, 200]
        states = [(await store.by_name[shard].states([t.id]))[0] for shard in "ab"]
        assert states == [State.COMMITTED, State.ROLLED_BACK]
        await store.close()

    asyncio.run(run())


def test_no_transaction_is_said_to_be_unknown_while_a_shard_fails_that_may_have_it(tmp_path: Path) -> None:
    """The first question that a database did not answer was answered without it: 404, after which a producer may purge
    the row that would answer a check."""

    async def run() -> None:
        places = " ".join(f"{name}=sqlite:///{tmp_path}/{name}.db" for name in "ab")
        store = open_storage(places, "main", retention_us=0, writers=1)
        await store.open(now())
        t = sent()
        await store.by_name["a"].put([t], now())
        assert await store.states([t.id]) == [State.PREPARED] and await store.producer_groups([t.id]) == ["g"]
        with store.by_name["a"].engine.begin() as connection:
            server_half_message.drop(connection)
        for asked in (store.states([t.id]), store.producer_groups([t.id])):
            assert len(store.healthy()) == 2
            with pytest.raises(Unavailable):
                await asked
        await store.close()

    asyncio.run(run())


def test_a_webhooks_answers_go_to_the_shards_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[list[OutcomeItem]] = []
    asked = [{"id": "x", "shard": shard, "token": token, "messages": []} for shard, token in (("a", "1"), ("b", "2"))]

    async def post(*_: object) -> bytes:
        return b'{"outcomes": [{"id": "x", "outcome": "ROLLBACK", "shard": "b"}, {"id": "x", "outcome": "COMMIT"}]}'

    async def run() -> None:
        polls = [list(asked)]

        async def poll(_: object) -> list[dict[str, object]]:
            if not polls:
                await asyncio.Event().wait()
            return polls.pop()

        async def record(group: str, outcomes: list[OutcomeItem]) -> None:
            recorded.append(outcomes)

        monkeypatch.setattr(webhooks, "post", post)
        core = SimpleNamespace(
            checks=SimpleNamespace(poll=poll), outcomes=SimpleNamespace(record=record), settings=Settings()
        )
        hooks = CheckWebhooks(core, dict)  # type: ignore[arg-type]
        hooks.follow({"g": "http://127.0.0.1:9"})
        await eventually_async(lambda: recorded, "the answers")
        await hooks.stop()

    asyncio.run(run())
    ((first, second),) = recorded
    assert (first.outcome, first.shard, first.check) == ("COMMIT", "a", "1")
    assert (second.outcome, second.shard, second.check) == ("ROLLBACK", "b", "2")


@pytest.mark.usefixtures("impatient_writers")
def test_a_database_that_is_away_is_not_asked_for_checks_without_a_pause(tmp_path: Path) -> None:
    """A server with a producer that polls tried to connect hundreds of times a second."""

    async def run() -> None:
        store = open_storage(f"sqlite:///{tmp_path}/a.db", "main", retention_us=0, writers=1)
        await store.open(now())
        assert store.next_check_us("g") == 0
        with store.first.engine.begin() as connection:
            server_half_message.drop(connection)
        at_us = now()
        assert await store.claim_checks("g", at_us, 10, 60_000_000) == []
        assert store.next_check_us("g") == at_us + LOOK_EVERY_US
        store.first.writer.failing_since = 1.0
        assert store.next_check_us("g") is None
        await store.close()

    asyncio.run(run())
