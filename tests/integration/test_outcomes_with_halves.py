"""Outcomes in a request with halves: one request and one wait for the disk, and each item has its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify.client import Message
from notify.client.producer.packing import pack
from notify.client.producer.transactions import HALVES, OUTCOMES, TransactionClient
from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.protocol.wire import PROBLEM_TYPE, Item, Problem
from notify.testing import InMemoryServer
from notify.testing.process import ServerProcess
from tests.support.http import post
from tests.support.servers import make_storage, stop_if_running
from tests.support.transactions import half_request, new_id

PAGE = b"<html>We are back in a minute</html>"


class Requests:
    """The paths of the requests that clients sent, and answers to give instead of the server's."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.instead: dict[str, tuple[int, bytes]] = {}
        """By path, what its next request is answered with; the server has carried it out."""

    def took(self) -> list[str]:
        """The paths of halves and outcomes since this was asked last."""
        paths, self.paths = [path for path in self.paths if path in (HALVES, OUTCOMES)], []
        return paths


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    seen = Requests()
    ask = HttpClient.ask

    async def asked(self: HttpClient, method: str, path: str, *arguments: Any) -> tuple[int, bytes]:
        seen.paths.append(path)
        answer = await ask(self, method, path, *arguments)
        return seen.instead.pop(path, answer)

    monkeypatch.setattr(HttpClient, "ask", asked)
    return seen


@pytest.fixture(params=["log", "sqlite", "workers"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server of each kind that takes transactions."""
    flags = {
        "log": [],
        "sqlite": ["--storage", f"sqlite:///{tmp_path}/notify.db"],
        "workers": ["--workers", "2"],
    }[request.param]
    if request.param == "sqlite":
        make_storage(flags[1])
    process = ServerProcess(tmp_path / "data", flags=flags).start()
    yield process.url
    stop_if_running(process)


def together(client: TransactionClient, prepared: Item, topic: str, key: str) -> tuple[Any, Any]:
    """The futures of an outcome and of the next half, sent in one turn of the loop as by a busy producer."""
    outcome = client.outcome_soon(prepared.id, prepared.shard, "COMMIT")
    half = client.half_soon(ids.to_text(ids.new_id()), [pack(Message(topic, "next", key=key))])
    return outcome, half


def state(url: str, group: str, transaction_id: str) -> str | None:
    answer = post(url, "/v1/transactions/states", {"producer_group": group, "ids": [transaction_id]})
    return answer["items"][0].get("state")


def test_a_half_takes_along_the_outcome_that_waits(url: str, requests: Requests, unique: str) -> None:
    async def scenario() -> None:
        client = TransactionClient(url, unique, instance="i")
        prepared = await client.half([pack(Message(unique, "first", key="a"))])
        requests.took()
        decided, stored = await asyncio.gather(*together(client, prepared, unique, "a"))
        assert requests.took() == [HALVES]
        assert (decided.id, decided.status, decided.state) == (prepared.id, 200, "COMMITTED")
        assert (stored.status, stored.state) == (201, "PREPARED")
        await client.outcome_soon(stored.id, stored.shard, "ROLLBACK")  # nothing to go along with
        assert requests.took() == [OUTCOMES]
        await client.close()

    asyncio.run(scenario())


def problem(status: int, code: str, detail: str) -> tuple[int, bytes]:
    return status, msgspec.json.encode(Problem(f"{PROBLEM_TYPE}{code}", code, status, detail, code))


@pytest.mark.parametrize(
    "answer",
    [
        problem(400, "invalid_schema", "unknown field"),
        (200, PAGE),
        problem(503, "unavailable", "it is starting"),
    ],
    ids=["an earlier version", "a page", "unavailable"],
)
def test_both_are_sent_again_where_their_request_fails(
    server: ServerProcess, requests: Requests, unique: str, answer: tuple[int, bytes]
) -> None:
    async def scenario() -> None:
        client = TransactionClient(server.url, unique, instance="i")
        prepared = await client.half([pack(Message(unique, "first"))])
        requests.took()
        requests.instead[HALVES] = answer
        decided, stored = await asyncio.gather(*together(client, prepared, unique, "a"))
        assert (decided.id, decided.state) == (prepared.id, "COMMITTED") and stored.state == "PREPARED"
        assert state(server.url, unique, prepared.id) == "COMMITTED"
        if answer[0] == 400:
            assert sorted(requests.took()) == [HALVES, HALVES, OUTCOMES]
            await client.http.refresh()  # the server says again that it takes both
            await asyncio.gather(*together(client, stored, unique, "a"))
            assert requests.took() == [HALVES]
        await client.close()

    asyncio.run(scenario())


def test_an_outcome_is_not_sent_with_a_half_to_a_server_without_its_shard(
    server: ServerProcess, requests: Requests, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client has learnt between the two that some servers alone have the shard."""

    async def scenario() -> None:
        client = TransactionClient(server.url, unique, instance="i")
        prepared = await client.half([pack(Message(unique, "first"))])
        requests.took()
        outcome = client.outcome_soon(prepared.id, "other", "COMMIT")
        monkeypatch.setattr(client.http, "_apart", frozenset({"other"}))
        half = client.half_soon(ids.to_text(ids.new_id()), [pack(Message(unique, "next"))])
        decided, stored = await asyncio.gather(outcome, half)
        assert sorted(requests.took()) == [HALVES, OUTCOMES]
        assert (stored.status, decided.status) == (201, 421)
        await client.close()

    asyncio.run(scenario())


def test_a_server_that_does_not_say_so_gets_no_outcomes_with_halves(
    memory: InMemoryServer, requests: Requests, unique: str
) -> None:
    """Earlier versions refuse the field. The test kit's server loses outcomes, and no halves with them."""

    async def scenario() -> None:
        client = TransactionClient(memory.url, unique, instance="i")
        prepared = await client.half([pack(Message(unique, "first"))])
        requests.took()
        await asyncio.gather(*together(client, prepared, unique, "a"))
        assert sorted(requests.took()) == [HALVES, OUTCOMES]
        await client.close()

    asyncio.run(scenario())


def test_each_item_has_the_result_that_it_would_have_alone(server: ServerProcess, unique: str) -> None:
    url, known = server.url, new_id()
    post(url, HALVES, half_request(unique, known, topic=unique))
    request = half_request(unique, topic=unique)
    request["transactions"].append({"id": new_id(), "messages": [{"topic": "no topic's name", "body": "x"}]})
    unknown = new_id()
    request["outcomes"] = [
        {"id": known, "outcome": "COMMIT"},
        {"id": known, "outcome": "ROLLBACK"},
        {"id": unknown, "outcome": "COMMIT"},
        {"id": known, "outcome": "PERHAPS"},
        {"id": known, "outcome": "COMMIT", "shard": "elsewhere"},
    ]
    answer = post(url, HALVES, request)
    assert [item["status"] for item in answer["items"]] == [201, 422]
    assert [(item["id"], item["status"], item.get("code")) for item in answer["outcomes"]] == [
        (known, 200, None),
        (known, 409, "outcome_conflict"),
        (unknown, 404, "unknown_transaction"),
        (known, 422, "invalid_outcome"),
        (known, 421, "wrong_shard"),
    ]
    assert "outcomes" not in post(url, HALVES, half_request(unique, topic=unique))
