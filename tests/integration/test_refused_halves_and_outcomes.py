"""Requests with halves and outcomes: one that is refused has done nothing, and an outcome fails no half."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from notify.check.schedule import CheckSchedule
from notify.errors import NotifyError, StorageFailed, Unavailable
from notify.protocol import ids
from notify.protocol.limits import LIMITS
from notify.protocol.wire import OutcomeItem
from notify.runtime.clock import wall_clock as now
from notify.server.core.check_log import CheckLog
from notify.server.core.core import Core
from notify.server.core.outcomes import Outcomes
from notify.server.data.request import Request
from notify.server.data.routes import DataRoutes
from notify.server.metrics import Metrics
from notify.server.settings import Settings
from notify.storage.checks import CheckAnswer
from notify.storage.memory import MemoryStore
from notify.storage.records import Decided, State
from notify.storage.sql.shards import SqlShards, open_storage
from notify.storage.sql.tables import server_half_message
from notify.storage.topics import Topic
from tests.support.clock import PATIENCE_SECONDS
from tests.support.transactions import half_request, new_id, sent

LONG_CHECK_US = 60_000_000


def asked_of(routes: DataRoutes, body: dict[str, Any], path: str = "/v1/transactions") -> Awaitable[tuple[int, Any]]:
    """Status and body of the answer to a POST."""

    async def ask() -> tuple[int, Any]:
        request = Request("POST", path, b"", [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")])
        request.body = json.dumps(body).encode()
        answer = await routes.answer(request)
        return answer.status, json.loads(answer.body)

    return ask()


@pytest.mark.parametrize(
    "fields",
    [
        {"transactions": []},
        {"source": "s" * 300},
        {"instance": "i" * 300},
        {"outcomes": [{"id": "x", "outcome": "COMMIT"}] * (LIMITS.items + 1)},
    ],
    ids=["no halves", "a long source", "a long instance", "too many outcomes"],
)
def test_a_request_that_is_refused_has_recorded_nothing(fields: dict[str, Any]) -> None:
    """The outcomes of the first three were recorded, and the half of the last one was stored."""

    async def scenario() -> None:
        store = MemoryStore()
        routes = DataRoutes(Core(store, Settings()))
        known, half = new_id(), new_id()
        assert (await asked_of(routes, half_request(transaction_id=known)))[0] == 200
        request = half_request(transaction_id=half) | {"outcomes": [{"id": known, "outcome": "COMMIT"}]} | fields
        assert (await asked_of(routes, request))[0] == 422
        assert await store.states([ids.from_text(known), ids.from_text(half)]) == [State.PREPARED, None]

    asyncio.run(scenario())


def test_an_outcome_whose_shard_is_away_fails_no_half_and_no_other_outcome(tmp_path: Path) -> None:
    """Each of the outcomes for b failed the whole request, whose half a had stored; those for a were not told."""

    async def scenario() -> None:
        places = " ".join(f"{name}=sqlite:///{tmp_path}/{name}.db" for name in "ab")
        store = open_storage(places, "main", retention_us=0, writers=1)
        await store.open(now())
        routes = DataRoutes(Core(store, Settings()))
        at = {name: [id_of(name, store) for _ in range(3)] for name in "ab"}
        for name in (*at["a"], *at["b"]):
            assert (await asked_of(routes, half_request(transaction_id=name)))[0] == 200
        with store.by_name["b"].engine.begin() as connection:
            server_half_message.drop(connection)
        outcomes = [
            {"id": at["a"][0], "outcome": "COMMIT", "shard": "a"},
            {"id": at["b"][0], "outcome": "COMMIT", "shard": "b"},
            {"id": at["b"][1], "outcome": "UNKNOWN", "check": "1", "shard": "b"},
            {"id": at["a"][1], "outcome": "ROLLBACK"},
            {"id": new_id(), "outcome": "COMMIT"},
        ]
        half = id_of("a", store)
        status, answer = await asked_of(routes, half_request(transaction_id=half) | {"outcomes": outcomes})
        assert (status, [item["status"] for item in answer["items"]]) == (200, [201])
        told = [(item["status"], item.get("state")) for item in answer["outcomes"]]
        assert told == [(200, "COMMITTED"), (500, None), (503, None), (200, "ROLLED_BACK"), (500, None)]
        states = await store.by_name["a"].states([ids.from_text(name) for name in (*at["a"], half)])
        assert states == [State.COMMITTED, State.ROLLED_BACK, State.PREPARED, State.PREPARED]
        await store.close()

    asyncio.run(scenario())


def id_of(shard: str, store: SqlShards) -> str:
    """A new id whose transaction goes to a shard."""
    while True:
        made = ids.new_id()
        if store._placing.place_of(made, store.shards()) == shard:
            return ids.to_text(made)


def test_a_fault_of_the_outcomes_fails_no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        core = Core(store, Settings())

        async def decide(*_: Any, **__: Any) -> list[Decided]:
            raise KeyError("a fault of the server")

        monkeypatch.setattr(store, "decide", decide)
        half = new_id()
        request = half_request(transaction_id=half) | {"outcomes": [{"id": new_id(), "outcome": "COMMIT"}]}
        status, answer = await asked_of(DataRoutes(core), request)
        assert (status, answer["items"][0]["status"]) == (200, 201)
        assert [(item["status"], item["code"]) for item in answer["outcomes"]] == [(500, "storage_failed")]

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [Unavailable("too much waits"), StorageFailed("the disk failed")])
def test_each_item_refused_by_the_storage_has_its_error(monkeypatch: pytest.MonkeyPatch, failure: NotifyError) -> None:
    """A failure that is not retryable was an item's where an UNKNOWN met it, and the request's otherwise."""

    async def scenario() -> None:
        store = MemoryStore()
        routes = DataRoutes(Core(store, Settings()))
        ((name, token),) = (await checked(store, 1)).items()
        outcomes = [
            {"id": name, "outcome": "COMMIT"},
            {"id": name, "outcome": "UNKNOWN", "check": token},
            {"id": name, "outcome": "PERHAPS"},
        ]

        async def refuse(*_: Any, **__: Any) -> Any:
            raise failure

        for method in ("put", "decide", "checking"):
            monkeypatch.setattr(store, method, refuse)
        told = await asked_of(routes, {"producer_group": "g", "outcomes": outcomes}, "/v1/transactions/outcomes")
        assert (told[0], [item["status"] for item in told[1]["items"]]) == (200, [failure.status, failure.status, 422])
        status, answer = await asked_of(routes, half_request() | {"outcomes": outcomes})
        assert (status, [item["status"] for item in answer["items"]]) == (200, [failure.status])
        assert [item["status"] for item in answer["outcomes"]] == [failure.status, failure.status, 422]

    asyncio.run(scenario())


def outcomes_on(store: MemoryStore) -> Outcomes:
    return Outcomes(store, now, shard="main", schedule=CheckSchedule(), metrics=Metrics(), check_log=CheckLog())


async def checked(store: MemoryStore, count: int) -> dict[str, str]:
    """Transactions whose check is under way: their ids with the tokens."""
    store.create_topic_soon(Topic("t"))
    await store.put([sent(check_after_us=0) for _ in range(count)], now())
    claimed = await store.claim_checks("g", now() + 1, count, LONG_CHECK_US)
    return {ids.to_text(due.id): str(due.token) for due in claimed}


def count_calls(function: Callable[..., Awaitable[Any]], calls: list[int]) -> Callable[..., Awaitable[Any]]:
    async def counted(asked: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(len(asked))
        return await function(asked, *arguments, **named)

    return counted


def test_one_id_with_two_outcomes_makes_no_wait_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer's outcome and its answer to a check, say: each outcome of the request waited for the disk alone."""

    async def scenario() -> None:
        store = MemoryStore()
        tokens = await checked(store, 50)
        calls: list[int] = []
        monkeypatch.setattr(store, "decide", count_calls(store.decide, calls))
        answers = [OutcomeItem(id=name, outcome="COMMIT", check=token) for name, token in tokens.items()]
        first = answers[0].id
        twice = [
            OutcomeItem(id=first, outcome="ROLLBACK", check="1"),
            *answers,
            OutcomeItem(id=first, outcome="COMMIT"),
        ]
        told = await outcomes_on(store).record("g", twice)
        assert [(item.status, item.state) for item in told] == [(410, "PREPARED"), *[(200, "COMMITTED")] * 51]
        assert calls == [50, 1, 1]

    asyncio.run(scenario())


def test_checks_answered_unknown_wait_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their waits for the disk or the database added up, and a half beside them waited for all."""

    async def scenario() -> None:
        store = MemoryStore()
        tokens = await checked(store, 5)
        answer_check, entered, all_entered = store.answer_check, [], asyncio.Event()

        async def wait_for_all(answer: CheckAnswer) -> bool:
            entered.append(answer)
            if len(entered) == len(tokens):
                all_entered.set()
            await all_entered.wait()
            return await answer_check(answer)

        monkeypatch.setattr(store, "answer_check", wait_for_all)
        asked = [OutcomeItem(id=name, outcome="UNKNOWN", check=token) for name, token in tokens.items()]
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = await outcomes_on(store).record("g", asked)
        assert [(item.id, item.status, item.state) for item in told] == [(o.id, 200, "PREPARED") for o in asked]

    asyncio.run(scenario())


def test_a_decision_comes_before_an_unknown_of_the_same_request() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        ((name, token),) = (await checked(store, 1)).items()
        asked = [OutcomeItem(id=name, outcome=outcome, check=token) for outcome in ("UNKNOWN", "COMMIT")]
        told = await outcomes_on(store).record("g", asked)
        assert [(item.status, item.state) for item in told] == [(200, "COMMITTED")] * 2

    asyncio.run(scenario())
