"""A client sends its token only to servers that it may trust, and chooses among them by room and load."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from notify.client import AsyncReader, Message
from notify.client.producer.packing import pack
from notify.client.producer.transactions import FORGET_SECONDS, TransactionClient
from notify.client.transport.http import HttpClient
from notify.client.transport.servers import (
    ASKED_SECONDS,
    LISTING_SECONDS,
    NEXT_SECONDS,
    REFRESH_SECONDS,
    Candidate,
    Servers,
)
from notify.errors import ForeignAnswer, InvalidRequest, NotifyError, Timeout, Unauthorized, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Item, Items, PackedTransactions, encode_msgpack
from tests.support.virtual_loop import pass_seconds


def members(*urls: str) -> bytes:
    rows = [{"name": url, "kind": "server", "url": url, "roles": ["transactions"]} for url in urls]
    return msgspec.msgpack.encode({"version": 1, "members": rows})


@pytest.mark.parametrize(
    ("seeds", "told", "used"),
    [
        ("https://a:1", ("https://a:1", "http://b:1", "HTTP://c:1", "https://d:1"), {"https://a:1", "https://d:1"}),
        ("https://a:1", ("http://b:1",), {"https://a:1"}),
        ("https://a:1,https://b:1", ("http://a:1", "ftp://b:1"), {"https://a:1", "https://b:1"}),
        ("http://a:1", ("http://a:1", "https://b:1"), {"http://a:1", "https://b:1"}),
    ],
)
async def test_a_member_in_the_clear_is_refused_where_the_seeds_are_not(
    seeds: str, told: tuple[str, ...], used: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: set[str] = set()

    async def call(self: HttpClient, method: str, path: str, *_: Any) -> bytes:
        asked.add(self.url)
        return members(*told)

    monkeypatch.setattr(HttpClient, "call", call)

    servers = Servers(seeds, "transactions", tls=ssl.create_default_context(), token="nt_secret")
    for _ in range(20):
        await servers.refresh()
        assert set(servers.urls()) == used
        await servers.call("POST", "/v1/transactions", b"", 1.0)
    await servers.aclose()
    assert asked <= used
    refused = [record for record in caplog.records if "in the clear" in record.getMessage()]
    assert len(refused) == len(set(told) - used)  # each refusal is logged once


ROOMS = [
    {"name": n, "kind": "server", "url": f"http://{n}:1", "roles": ["transactions"], "room": room, "load": load}
    for n, room, load in (("a", "east", 1e9), ("b", "east", 3.0), ("c", "west", 0.0), ("d", "", 1e9))
]


def chosen(room: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Counter[str]:
    """Where 60 clients of a room send their first request."""
    asked: Counter[str] = Counter()

    async def call(self: HttpClient, method: str, path: str, *_: Any) -> bytes:
        if path == "/v1/transactions":
            asked[self.url] += 1
        return msgspec.msgpack.encode({"version": 1, "members": ROOMS})

    async def scenario() -> None:
        for _ in range(60):
            servers = Servers("http://a:1", "transactions", room, **options)
            await servers.refresh()
            await servers.call("POST", "/v1/transactions", b"", 1.0)
            await servers.aclose()

    with monkeypatch.context() as changed:
        changed.setattr(HttpClient, "call", call)
        asyncio.run(scenario())
    return asked


def test_a_client_chooses_an_idle_server_of_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("east", monkeypatch) == {"http://b:1": 60}
    assert chosen("west", monkeypatch) == {"http://c:1": 60}
    assert set(chosen("", monkeypatch)) == {"http://b:1", "http://c:1"}  # by chance, or all would choose the same


def test_a_chooser_of_the_user_picks_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def busiest(candidates: Sequence[Candidate], room: str) -> Candidate:
        assert room == "east" and len(candidates) == 4
        return max(candidates, key=lambda c: (c.load, c.url))

    assert chosen("east", monkeypatch, chooser=busiest) == {"http://d:1": 60}
    with pytest.raises(InvalidRequest, match="none of http://a:1"):
        chosen("east", monkeypatch, chooser=lambda candidates, room: Candidate("http://elsewhere:1"))


async def test_a_request_for_all_workers_is_sent_to_no_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the given address failed, a worker was asked, whose answer is only its own share."""
    rows = [
        {"name": n, "kind": "server", "url": f"http://a:1/{n}", "roles": ["queue"], "shards": [n]} for n in ("w1", "w2")
    ]
    asked: list[str] = []

    async def call(self: HttpClient, method: str, path: str, *_: Any) -> bytes:
        if path == "/v1/members":
            return msgspec.msgpack.encode({"version": 1, "members": rows, "keys": ["w1", "w2"]})
        asked.append(self.url)
        raise Unavailable("away")

    monkeypatch.setattr(HttpClient, "call", call)

    servers = Servers("http://a:1,http://b:1", "queue")
    await servers.refresh()
    with pytest.raises(Unavailable):
        await servers.call("GET", "/v1/admin/overview", b"", 1.0, of_all=True)
    await servers.aclose()
    assert sorted(asked) == ["http://a:1", "http://b:1"]


# --- when the members are known ------------------------------------------------------------------------------------

WORKERS = msgspec.msgpack.encode(
    {
        "version": 1,
        "keys": ["w1", "w2"],
        "members": [
            {"name": n, "kind": "server", "url": f"http://a:1/{n}", "roles": ["queue", "transactions"], "shards": [n]}
            for n in ("w1", "w2")
        ],
    }
)
"""The answer of the workers of one machine, which divide the keys."""
NEVER = 1e9


class Line:
    """The way to servers, in virtual time: how long each takes to list the members, or how it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: Mapping[str, float | NotifyError]) -> None:
        self._takes = takes
        self.asked: list[tuple[str, float]] = []
        """The hosts that were asked for the members, and when."""
        line = self

        async def call(client: HttpClient, method: str, path: str, body: bytes, seconds: float, *_: Any) -> bytes:
            is_worker = client.url.count("/") > 2  # at its own address
            return WORKERS if is_worker else await line.answer(client.address[0], path, seconds)

        monkeypatch.setattr(HttpClient, "call", call)

    async def answer(self, host: str, path: str, seconds: float) -> bytes:
        if path != "/v1/members":
            return msgspec.msgpack.encode({"items": []})
        self.asked.append((host, round(asyncio.get_running_loop().time(), 3)))
        takes = self._takes[host]
        if isinstance(takes, NotifyError):
            raise takes
        await pass_seconds(min(takes, seconds))
        if takes > seconds:
            raise Timeout(f"no answer to GET {path} within {seconds:g} s; it may have been carried out")
        return WORKERS


@pytest.mark.virtual_time
async def test_a_slow_server_is_no_single_log_to_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listed the members after more than a second, and a reader read the log of one worker for all."""
    line = Line(monkeypatch, {"a": 3.0})
    async with AsyncReader("http://a:1") as reader:
        assert list(await reader.shards()) == ["w1", "w2"]
        assert len(line.asked) == 1


@pytest.mark.virtual_time
async def test_a_reader_that_no_server_answers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    takes: dict[str, Any] = {"a": Unavailable("no server at http://a:1: refused"), "b": NEVER}
    line = Line(monkeypatch, takes)
    async with AsyncReader("http://a:1,http://b:1") as reader:
        with pytest.raises(Unavailable, match="no server at http://a:1"):
            await reader.shards()
        takes["a"] = NEVER
        with pytest.raises(Timeout, match="no answer from http://a:1 and http://b:1 within 30 s"):
            await reader.shards()
        takes["a"] = 0.1
        assert list(await reader.shards()) == ["w1", "w2"]
    assert line.asked[-1][0] == "a"


@pytest.mark.virtual_time
async def test_a_refusal_tells_more_than_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    Line(monkeypatch, {"a": NEVER, "b": Unauthorized("no token"), "c": Unavailable("refused")})
    servers = Servers("http://a:1,http://b:1,http://c:1", "queue")
    with pytest.raises(Unauthorized):
        await servers.known(LISTING_SECONDS)
    await servers.aclose()


@pytest.mark.virtual_time
async def test_a_first_request_waits_a_second_and_a_server_that_was_silent_is_soon_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes: dict[str, Any] = {"a": NEVER}
    line = Line(monkeypatch, takes)
    now = asyncio.get_running_loop().time
    servers = Servers("http://a:1", "transactions")
    await servers.asked()
    assert now() == ASKED_SECONDS
    takes["a"] = 0.1
    while not servers.keys:
        await pass_seconds(0.01)
    assert line.asked == [("a", 0), ("a", LISTING_SECONDS + REFRESH_SECONDS)]
    await servers.aclose()


@pytest.mark.parametrize(
    ("takes", "asked"),
    [
        ({"a": 0.1, "b": 0.1}, [("a", 0)]),
        ({"a": NEVER, "b": 0.1}, [("a", 0), ("b", NEXT_SECONDS)]),
        ({"a": Unavailable("away"), "b": 0.1}, [("a", 0), ("b", 0)]),
        ({"a": 1.5, "b": NEVER}, [("a", 0), ("b", NEXT_SECONDS)]),
        ({"a": Unauthorized("no token"), "b": 0.1}, [("a", 0), ("b", 0)]),
    ],
)
@pytest.mark.virtual_time
async def test_another_address_is_asked_after_a_second_or_a_failure(
    takes: dict[str, Any], asked: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(monkeypatch, takes)
    servers = Servers("http://a:1,http://b:1", "queue")
    await servers.refresh()
    assert servers.keys == ("w1", "w2") and line.asked[: len(asked)] == asked
    await servers.aclose()


# --- what an attempt tells that hardly had time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_takes", "told"),
    [
        pytest.param(2.9, ForeignAnswer, id="hardly any time is left"),
        pytest.param(0.1, Timeout, id="a server that hangs"),
    ],
)
@pytest.mark.virtual_time
async def test_a_last_attempt_without_time_does_not_hide_who_answered(
    first_takes: float, told: type[NotifyError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy answers the first attempt, and nothing answers the second."""
    attempts: list[float] = []

    async def call(self: HttpClient, method: str, path: str, body: bytes, seconds: float, *_: Any) -> bytes:
        if path == "/v1/members":
            return members("http://a:1")
        attempts.append(seconds)
        if len(attempts) == 1:
            await pass_seconds(first_takes)
            raise ForeignAnswer("404 from a proxy", answered=404)
        await pass_seconds(seconds)
        raise Timeout("no answer")

    monkeypatch.setattr(HttpClient, "call", call)

    client = TransactionClient("http://a:1", "g", instance="i", half_seconds=3.0)
    with pytest.raises(NotifyError) as raised:
        await client.half([pack(Message("t", "x"))])
    assert type(raised.value) is told and len(attempts) == 2
    await client.http.aclose()


@pytest.mark.virtual_time
async def test_the_deadline_of_a_half_that_nobody_waits_for_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed for ever, and each later answer was looked at item by item."""
    busy: set[str] = set()

    async def call(self: HttpClient, method: str, path: str, body: bytes, *_: Any) -> bytes:
        if path == "/v1/members":
            return members("http://a:1")
        halves = msgspec.msgpack.decode(body, type=PackedTransactions).transactions
        return encode_msgpack(Items([Item(half.id, 503 if half.id in busy else 201) for half in halves]))

    monkeypatch.setattr(HttpClient, "call", call)
    client = TransactionClient("http://a:1", "g", instance="i", half_seconds=3.0)
    given_up, stored = (ids.to_text(ids.new_id()) for _ in range(2))
    busy.add(given_up)
    waiting = client.half_soon(given_up, [pack(Message("t", "x"))])
    while not client._deadlines:
        await pass_seconds(0.01)
    waiting.cancel()
    await pass_seconds(3.0 + FORGET_SECONDS)
    assert (await client.half_soon(stored, [pack(Message("t", "x"))])).status == 201
    assert client._deadlines == {}
    await client.http.aclose()
