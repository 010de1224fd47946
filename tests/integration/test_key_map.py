"""Keys move to other shards while producers send: each key stays in order, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from notify.client.producer.transactions import TransactionClient, accepted
from notify.client.transport.http import HttpClient
from notify.errors import Conflict, InvalidRequest, NotifyError, Unavailable
from notify.movers.relay.relay import Relay
from notify.protocol.keys import key_hash
from notify.protocol.wire import (
    Item,
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    encode_msgpack,
)
from notify.runtime.clock import wall_clock
from notify.storage.records import State
from notify.storage.sql import key_map, placing
from notify.storage.sql.engines import opened
from notify.storage.sql.key_map import KeyMap
from notify.storage.sql.shards import SqlShards, open_storage
from notify.storage.sql.tables import server_half_message, server_key_map, server_key_map_change, server_member
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually, eventually_async
from tests.support.commands import cli
from tests.support.databases import empty_database
from tests.support.groups import drain, subscribe
from tests.support.http import admin, call
from tests.support.servers import Started, make_storage, stop_if_running
from tests.support.shop import make_engine
from tests.support.transactions import half_request, new_id, sent

KEYS = [f"k{n}" for n in range(12)]
STAYS = {k for k in KEYS if key_hash(k) % 2 == key_hash(k) % 3}  # as a, b grow to a, b, c
MOVES = set(KEYS) - STAYS
now = wall_clock


@pytest.fixture(scope="module")
def kept_databases(
    database_urls: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        urls = {}
        for name in "abc":
            urls[name] = stack.enter_context(
                empty_database("postgresql", database_urls, tmp_path_factory.mktemp("shards"))
            )
            make_storage(urls[name], name)
        yield urls


@pytest.fixture
def databases(kept_databases: dict[str, str]) -> dict[str, str]:
    """Three empty databases of PostgreSQL: the shards a, b and c."""
    for url in kept_databases.values():
        with opened(url) as engine, engine.begin() as connection:
            for table in (server_half_message, server_key_map_change, server_key_map, server_member):
                connection.execute(sa.delete(table))
    return kept_databases


def storage_of(databases: dict[str, str], names: str) -> str:
    return " ".join(f"{name}={databases[name]}" for name in names)


class Producers:
    """A producer for each key: it sends 0, 1, 2, …, each after the one before is committed."""

    def __init__(self, url: str, topic: str) -> None:
        self.url, self.topic = url, topic
        self.sent = dict.fromkeys(KEYS, 0)
        self.refusals: dict[str, str] = {}
        """The error with which a key's messages are refused at the moment, by key."""
        self._http: dict[str, HttpClient] = {}
        self._tasks = [asyncio.create_task(self._send(key)) for key in KEYS]

    async def _send(self, key: str) -> None:
        while True:
            body = json.dumps({"key": key, "n": self.sent[key]}).encode()
            name = new_id()
            t = PackedTransaction(id=name, messages=[PackedMessage(topic=self.topic, body=body, key=key)])
            request = PackedTransactions(producer_group="g", transactions=[t])
            stored = await self._carried_out(key, "/v1/transactions", request)
            outcome = OutcomeItem(id=name, outcome="COMMIT", shard=stored["shard"])
            await self._carried_out(key, "/v1/transactions/outcomes", Outcomes(producer_group="g", outcomes=[outcome]))
            self.sent[key] += 1
            await asyncio.sleep(0.01)  # the pace of the load

    async def _carried_out(self, key: str, path: str, request: Any) -> Any:
        while True:
            try:
                http = self._http.setdefault(self.url, HttpClient(self.url))
                answer = await http.call("POST", path, encode_msgpack(request), PATIENCE_SECONDS)
                item = msgspec.msgpack.decode(answer)["items"][0]
            except NotifyError as error:
                item = {"status": 503, "detail": str(error)}
            if item["status"] in (200, 201):
                self.refusals.pop(key, None)
                return item
            assert item["status"] == 503, item
            self.refusals[key] = item["detail"]
            await asyncio.sleep(0.05)  # the pause between two tries

    async def more_of(self, keys: Collection[str]) -> None:
        """Wait until each of these keys has sent some more messages."""
        before = dict(self.sent)
        await eventually_async(lambda: all(self.sent[key] >= before[key] + 3 for key in keys), f"more of {keys}")

    async def all_held(self, keys: Collection[str]) -> None:
        """Wait until each of these keys is refused because it moves."""
        await eventually_async(
            lambda: all("moves to shard" in self.refusals.get(key, "") for key in keys), f"{keys} to be refused"
        )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for http in self._http.values():
            http.close()


@asynccontextmanager
async def relaying(url: str, queue: str) -> AsyncIterator[Relay]:
    engine = make_engine(url)
    relay = Relay(engine, queue)
    task = asyncio.create_task(relay.run(interval=0.05))
    try:
        yield relay
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.dispose()


async def the_sdk_tries_again(patient: TransactionClient, url: str, topic: str) -> asyncio.Future[Item]:
    """Send two keys in one batch, one of which moves: the other is stored at once, this one later or never."""

    def half_of(client: TransactionClient, key: str) -> asyncio.Future[Item]:
        return client.half_soon(new_id(), [PackedMessage(topic=f"{topic}-sdk", body=b"x", key=key)])

    moves, stays = min(MOVES), min(STAYS)
    waiting = half_of(patient, moves)
    assert accepted(await half_of(patient, stays)).status == 201
    hasty = TransactionClient(url, "sdk", instance="i", half_seconds=1)
    for _ in range(round(PATIENCE_SECONDS)):
        late, taken = await asyncio.gather(half_of(hasty, moves), half_of(hasty, stays), return_exceptions=True)
        if isinstance(late, Item) and isinstance(taken, Item):
            break  # otherwise the machine was too slow for this client: try again
    assert isinstance(late, Item) and isinstance(taken, Item), (late, taken)
    assert (late.status, taken.status) == (503, 201)
    assert hasty._deadlines == {}, "a leak of memory, which nothing else shows"
    assert not waiting.done()
    await hasty.close()
    return waiting


@pytest.mark.long
def test_keys_move_under_load_and_stay_in_order(
    databases: dict[str, str], server: ServerProcess, unique: str, tmp_path: Path
) -> None:
    subscribe(server.url, unique, unique)
    show = ("storage", "key-map", "--storage", databases["a"], "--json", "--wait")

    def state() -> dict[str, Any]:
        return cli(*show, "0")[1]

    async def run(stack: ExitStack) -> tuple[int, list[dict[str, Any]]]:
        def serve(names: str, number: int = 0) -> ServerProcess:
            place = tmp_path / f"server-{names}-{number}"
            started = ServerProcess(place, flags=["--storage", storage_of(databases, names)]).start()
            stack.callback(stop_if_running, started)
            return started

        # Two servers start at once: both try to write the first version.
        old, other = await asyncio.gather(*(asyncio.to_thread(serve, "ab", number) for number in range(2)))
        await asyncio.to_thread(eventually, lambda: state()["version"] == 1, "the first version")
        new = await asyncio.to_thread(serve, "abc")
        # Shard c is there, and has no keys.
        assert state() == {"version": 1, "shards": ["a", "b"], "waits_for": ""}
        producers = Producers(old.url, unique)
        try:
            async with relaying(databases["b"], server.url), relaying(databases["c"], server.url):
                async with relaying(databases["a"], server.url):
                    await producers.more_of(KEYS)
                # From here on no server carries shard a. The old servers do not know c: they cannot follow.
                code, begun = await asyncio.to_thread(cli, *show, "0", "--shards", "a,b,c")
                assert (code, begun["waits_for"]) == (1, "servers to follow")
                await asyncio.to_thread(eventually, lambda: 2 in followed(new), "the new server to follow")
                await producers.more_of(KEYS)
                assert state()["waits_for"] == "servers to follow"
                producers.url = new.url
                await asyncio.gather(asyncio.to_thread(old.stop), asyncio.to_thread(other.stop))
                reach = "what was committed before it to reach the queue"
                await asyncio.to_thread(eventually, lambda: state()["waits_for"] == reach, reach)
                await producers.all_held(MOVES)
                stuck = dict(producers.sent)
                await producers.more_of(STAYS)
                assert {key for key in KEYS if producers.sent[key] == stuck[key]} == MOVES
                client = TransactionClient(new.url, "sdk", instance="i", half_seconds=2 * PATIENCE_SECONDS)
                waiting = await the_sdk_tries_again(client, new.url, unique)
                code, refused = cli(*show, "0", "--shards", "a")
                assert code == 2 and "is still under way" in refused["text"]
                async with relaying(databases["a"], server.url):
                    assert await asyncio.to_thread(cli, *show, str(PATIENCE_SECONDS)) == (
                        0,
                        {"version": 2, "shards": ["a", "b", "c"], "waits_for": ""},
                    )
                    assert accepted(await waiting).status == 201
                    await client.close()
                    await producers.more_of(KEYS)
                    await producers.stop()
                    total = sum(producers.sent.values())
                    return total, await asyncio.to_thread(drain, server.url, unique, unique, total)
        finally:
            await producers.stop()

    with ExitStack() as stack:
        total, messages = asyncio.run(run(stack))
    by_key: dict[str, list[int]] = defaultdict(list)
    for m in messages:
        body = json.loads(m["body"])
        by_key[body["key"]].append(body["n"])
    # One more message of a key may have been committed as its producer was stopped.
    assert {k: v for k, v in by_key.items() if v != list(range(len(v)))} == {}
    assert total <= sum(map(len, by_key.values())) <= total + len(KEYS)


def followed(server: ServerProcess) -> set[int]:
    """The versions that the servers of the registry follow."""
    return {int(m["detail"].get(key_map.FOLLOWS, 0)) for m in admin(server.url, "GET", "nodes")["members"]}


@pytest.fixture
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline passes while a slow machine carries out a test's steps."""
    monkeypatch.setattr(key_map, "SETTLE_SECONDS", 100.0)
    monkeypatch.setattr(placing, "LEASE_SECONDS", 3600.0)


@pytest.mark.long
@pytest.mark.usefixtures("no_haste")
def test_a_change_of_the_map_waits_for_prepared_transactions(
    databases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, without servers: an open half holds up the second step, one in doubt does not."""

    async def run() -> None:
        store = open_storage(storage_of(databases, "ab"), "main", retention_us=0, writers=1)
        assert isinstance(store, SqlShards)
        await store.open(now())
        engine = store.engines["a"]

        def step() -> KeyMap:
            with engine.begin() as connection:
                key_map.advance(connection, key_map.newest(connection), store.engines)
            with engine.begin() as connection:
                return key_map.newest(connection)

        with store.engines["b"].begin() as connection:
            with pytest.raises(InvalidRequest, match="not the registry"):
                key_map.change(connection, ["b"])
        with engine.begin() as connection:
            key_map.make_first(connection, ["a", "b"])
            key_map.make_first(connection, ["b"])  # there is one already
            for wrong in ([], ["a", "a"]):
                with pytest.raises(InvalidRequest):
                    key_map.change(connection, wrong)
            assert key_map.newest(connection) == KeyMap(1, ("a", "b"))
        key_of_a = next(key for key in KEYS if store.shard_of(sent(key=key)) == "a")
        doubtful = sent(key=key_of_a)
        await store.put([doubtful], now() - 300 * 1_000_000)  # in doubt for five minutes: the producer is unreachable
        begun, plain = sent(key=key_of_a), sent()
        await store.put([begun, plain], now())
        with engine.begin() as connection:
            assert key_map.change(connection, ["b", "a"]) == 2
            assert store.follow(key_map.newest(connection)) == 2
        with pytest.raises(Unavailable, match="moves to shard 'b'"):
            await store.put([sent(key=key_of_a)], now())
        assert (await store.put([sent()], now()))[0].state == State.PREPARED  # a message without a key is stored
        assert step().waits_for == "what was prepared before it to be decided"
        assert step().waits_for == "what was prepared before it to be decided"
        await store.decide([(begun.id, "g", State.COMMITTED)], now())
        assert step().waits_for == "what was committed before it to reach the queue"
        assert step().waits_for == "what was committed before it to reach the queue"
        with store.engines["a"].begin() as connection:  # a relay marks the row once the queue has it
            connection.exec_driver_sql("UPDATE server_half_message SET relayed = 1 WHERE state = 'COMMITTED'")
        assert store.follow(step()) == 2
        assert (await store.put([sent(key=key_of_a)], now()))[0].shard == "b"
        # A server that has not reached the registry for long refuses every key.
        monkeypatch.setattr(placing, "LEASE_SECONDS", -1.0)
        with pytest.raises(Unavailable, match="registry"):
            await store.put([sent(key=key_of_a)], now())
        assert (await store.put([sent()], now()))[0].state == State.PREPARED
        await store.close()

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.usefixtures("no_haste")
def test_batches_on_their_way_count_for_the_old_map(databases: dict[str, str]) -> None:
    async def run() -> None:
        store = open_storage(storage_of(databases, "ab"), "main", retention_us=0, writers=1)
        assert isinstance(store, SqlShards)
        await store.open(now())
        assert store.follow(KeyMap(1, ("a", "b"))) == 1
        sending = asyncio.create_task(store.put([sent(key="k")], now()))
        await asyncio.sleep(0)  # a turn of the loop
        assert store.follow(KeyMap(2, ("b", "a"), ("a", "b"))) == 1
        await sending
        assert store.follow(KeyMap(2, ("b", "a"), ("a", "b"))) == 2
        # This server has no shard z: it stores keys while the change waits for it to follow, and no longer.
        assert store.follow(KeyMap(2, ("b", "a"))) == 2
        assert store.follow(KeyMap(3, ("b", "z"), ("b", "a"))) == 2
        assert (await store.put([sent(key="k")], now()))[0].state == State.PREPARED
        for foreign in (KeyMap(3, ("b", "z"), ("b", "a"), followed_us=1), KeyMap(3, ("b", "z")), KeyMap(9, ("z",))):
            assert store.follow(foreign) == 2
            with pytest.raises(Unavailable, match="does not know"):
                await store.put([sent(key="k")], now())
            assert (await store.put([sent()], now()))[0].state == State.PREPARED
        await store.close()

    asyncio.run(run())


@pytest.mark.long
def test_a_change_with_a_mistyped_shard_is_taken_back(databases: dict[str, str], tmp_path: Path) -> None:
    """A change to an unknown shard can be taken back. No server followed it, and its keys were refused for ever."""
    command = ("storage", "key-map", "--storage", databases["a"], "--json", "--wait", "0")
    request = {"producer_group": "g"}

    def statuses(server: ServerProcess) -> set[int]:
        halves = [half_request(key=key)["transactions"][0] for key in KEYS]
        items = call(server.url, "POST", "/v1/transactions", request | {"transactions": halves})["items"]
        return {item["status"] for item in items}

    with ExitStack() as stack:
        servers = Started(storage_of(databases, "ab"), tmp_path, stack)
        first = servers.add()
        assert statuses(first) == {201}
        code, refused = cli(*command, "--shards", "a,bb")
        assert code == 2 and "no running server knows shard bb" in refused["text"]
        code, refused = cli(*command, "--take-back")
        assert code == 2 and "no change of the key map is under way" in refused["text"]
        first.stop()
        assert cli(*command, "--shards", "a,bb")[0] == 1, "no server is there that could refuse the change"
        second = servers.add()
        assert 503 in statuses(second)
        code, refused = cli(*command, "--shards", "a,b")
        assert code == 2 and "--take-back" in refused["text"]
        assert cli(*command, "--take-back") == (0, {"version": 3, "shards": ["a", "b"], "waits_for": ""})
        eventually(lambda: statuses(second) == {201}, "the server to take every key again")


@pytest.mark.long
@pytest.mark.usefixtures("no_haste")
def test_a_change_is_taken_back_until_it_is_through(databases: dict[str, str]) -> None:
    """A change is taken back at each of its steps; a change that is complete is not."""
    with opened(databases["a"]) as engine:

        def in_one(do: Callable[[sa.Connection], Any]) -> Any:
            with engine.begin() as connection:
                return do(connection)

        def step() -> None:
            in_one(lambda c: key_map.advance(c, key_map.newest(c), {"a": engine, "b": engine}))

        in_one(lambda c: key_map.make_first(c, ["a", "b"]))
        for steps in range(3):
            in_one(lambda c: key_map.change(c, ["b", "a"]))
            for _ in range(steps):
                step()
            under_way = in_one(key_map.newest)
            assert bool(under_way.followed_us) + bool(under_way.settled_us) == steps
            in_one(key_map.take_back)
            step()  # by a server that has not seen the take-back: there is no step left
            assert in_one(key_map.newest) == KeyMap(under_way.version + 1, ("a", "b"))
        version = in_one(lambda c: key_map.change(c, ["b", "a"]))
        for _ in range(3):
            step()
        assert in_one(key_map.newest) == KeyMap(version, ("b", "a"))
        with pytest.raises(Conflict, match="no change"):
            in_one(key_map.take_back)


def shards_of_keys(server: ServerProcess) -> tuple[set[str], set[str]]:
    """The shards that take a committed message of each key, and the keys that are refused for now."""
    halves = [half_request(key=key)["transactions"][0] | {"committed": True} for key in KEYS]
    items = call(server.url, "POST", "/v1/transactions", {"producer_group": "g", "transactions": halves})["items"]
    assert {item["status"] for item in items} <= {201, 503}
    refused = {key for key, item in zip(KEYS, items, strict=True) if item["status"] == 503}
    return {item["shard"] for item in items if item["status"] == 201}, refused


@pytest.mark.long
@pytest.mark.parametrize(
    "is_older",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["of this version", "that knew no map with one database"],
)
def test_one_database_grows_to_two(
    databases: dict[str, str], server: ServerProcess, tmp_path: Path, is_older: bool
) -> None:
    """Servers with the second database sent half of the keys there at once, while others still used the first only."""
    show = ("storage", "key-map", "--storage", databases["a"], "--json", "--wait", "0")

    def state() -> dict[str, Any]:
        return cli(*show)[1]

    def moved() -> bool:
        with opened(databases["a"]) as engine:
            asyncio.run(Relay(engine, server.url).run(once=True))
        return state()["waits_for"] == ""

    with ExitStack() as stack:
        old = Started(storage_of(databases, "a"), tmp_path / "old", stack).add()
        assert shards_of_keys(old) == ({"a"}, set())
        if is_older:
            old.stop()
            with opened(databases["a"]) as engine, engine.begin() as connection:
                connection.execute(sa.delete(server_key_map))
        new = Started(storage_of(databases, "ab"), tmp_path / "new", stack).add()
        assert shards_of_keys(new) == ({"a"}, set())
        assert state() == {"version": 1, "shards": ["a"], "waits_for": ""}
        assert cli(*show, "--shards", "a,b")[0] == 1
        eventually(lambda: 2 in followed(new), "the new server to follow")
        taken, refused = shards_of_keys(new)
        assert taken == {"a"} and refused
        if not is_older:
            assert state()["waits_for"] == "servers to follow"
            assert shards_of_keys(old) == ({"a"}, set())
            old.stop()
        eventually(moved, "the change to be through")
        eventually(lambda: shards_of_keys(new) == ({"a", "b"}, set()), "keys to be in both")


@pytest.mark.long
def test_a_new_shard_does_not_take_the_registrys_place(databases: dict[str, str], tmp_path: Path) -> None:
    """The registry is in the first shard by name: servers with an earlier one had a registry of their own."""
    with ExitStack() as stack:
        Started(storage_of(databases, "b"), tmp_path / "old", stack).add()
        new = ServerProcess(tmp_path / "new", flags=["--storage", storage_of(databases, "ab")])
        with pytest.raises(Unavailable):
            new.start()
        assert "shard 'a' is new" in "".join(new.output) and "--registry" in "".join(new.output)
        registry_of = ("--registry", databases["b"])
        elsewhere = Started(storage_of(databases, "ab"), tmp_path / "elsewhere", stack).add(*registry_of)
        assert shards_of_keys(elsewhere) == ({"b"}, set())
