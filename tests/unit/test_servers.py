"""A client sends its token only to servers that it may trust."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import msgspec
import pytest

from notify.client.http import HttpClient
from notify.client.servers import Servers


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
