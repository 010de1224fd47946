"""A client sends its token only to servers that it may trust, and chooses among them by room and load."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from notify.client.choosing import Candidate
from notify.client.http import HttpClient
from notify.client.servers import Servers
from notify.errors import InvalidRequest, Unavailable


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
def test_a_member_in_the_clear_is_refused_where_the_seeds_are_not(
    seeds: str, told: tuple[str, ...], used: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: set[str] = set()

    async def call(self: HttpClient, method: str, path: str, *_: Any) -> bytes:
        asked.add(self.url)
        return members(*told)

    async def scenario() -> None:
        servers = Servers(seeds, "transactions", tls=ssl.create_default_context(), token="nt_secret")
        for _ in range(20):
            await servers.refresh()
            assert set(servers.urls()) == used
            await servers.call("POST", "/v1/transactions", b"", 1.0)
        await servers.aclose()

    monkeypatch.setattr(HttpClient, "call", call)
    asyncio.run(scenario())
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


def test_a_choice_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def busiest(candidates: Sequence[Candidate], room: str) -> Candidate:
        assert room == "east" and len(candidates) == 4
        return max(candidates, key=lambda c: (c.load, c.url))

    assert chosen("east", monkeypatch, chooser=busiest) == {"http://d:1": 60}
    with pytest.raises(InvalidRequest, match="none of http://a:1"):
        chosen("east", monkeypatch, chooser=lambda candidates, room: Candidate("http://elsewhere:1"))


def test_a_request_for_all_workers_is_sent_to_no_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def scenario() -> None:
        servers = Servers("http://a:1,http://b:1", "queue")
        await servers.refresh()
        with pytest.raises(Unavailable):
            await servers.call("GET", "/v1/admin/overview", b"", 1.0, of_all=True)
        await servers.aclose()

    monkeypatch.setattr(HttpClient, "call", call)
    asyncio.run(scenario())
    assert sorted(asked) == ["http://a:1", "http://b:1"]
