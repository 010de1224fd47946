"""An answer with messages is lost on its way to a consumer: they come again at once, and no attempt counts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from notify.client import AsyncConsumer, Consumer
from notify.testing import InMemoryServer
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import lag, publish, subscribe
from tests.support.http import ask, post
from tests.support.proxy import Proxy

Got = list[tuple[str, int]]


@pytest.fixture
def proxy(frozen_server: InMemoryServer) -> Iterator[Proxy]:
    """A proxy in front of a server whose leases do not end."""
    address = urlsplit(frozen_server.url)
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        yield proxy


@contextlib.contextmanager
def consuming(url: str, group: str, got: Got, *, is_async: bool, batch: int | None) -> Iterator[None]:
    """A consumer of an ordered topic, whose handler notes bodies and attempts."""

    def note(messages: Any) -> None:
        got.extend([(m.text, m.attempt) for m in (messages if batch else [messages])])

    async def note_async(messages: Any) -> None:
        note(messages)

    consumer: Any = (AsyncConsumer if is_async else Consumer)(url, group=group)
    subscription = consumer.subscribe(group, mode="ordered", start="earliest", batch=batch)
    subscription(note_async if is_async else note)
    thread = threading.Thread(
        target=(lambda: asyncio.run(consumer.run())) if is_async else (lambda: consumer.run(signals=False)), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "coroutines"])
def test_an_ordered_key_goes_on_after_a_lost_answer(
    frozen_server: InMemoryServer, proxy: Proxy, unique: str, is_async: bool, batch: int | None
) -> None:
    """Before, the key stood still until the end of a lease, and the message came as a second attempt."""
    publish(frozen_server.url, unique, ["a1", "a2"], key=True)
    got: Got = []
    proxy.cut_at(rb"/receive", answer=True)
    with consuming(f"http://127.0.0.1:{proxy.port}", unique, got, is_async=is_async, batch=batch):
        eventually(lambda: len(got) == 2, "both messages")
        publish(frozen_server.url, unique, ["a3"], key=True)
        eventually(lambda: len(got) == 3, "the next one of the key")
        eventually(lambda: lag(frozen_server.url, unique) == 0, "all to be settled")
    assert (proxy.cuts, got) == (1, [("a1", 1), ("a2", 1), ("a3", 1)])


def test_the_request_of_a_plain_client_is_known_again(frozen_server: InMemoryServer, unique: str) -> None:
    server = frozen_server
    path = f"/v1/groups/{unique}/receive?request=7f3a.1"
    subscribe(server.url, unique, unique)
    publish(server.url, unique, ["x"])
    body = {"instance": "one", "topics": [unique]}
    first = post(server.url, path, body)["messages"]
    assert [m["body"] for m in first] == ["x"]
    assert post(server.url, path, body)["messages"] == first
    assert re.search(r"notify_answers_repeated_total [1-9]", ask(server.url, "GET", "/metrics")[1])
    status, problem = ask(server.url, "POST", f"/v1/groups/{unique}/receive?request=a%20b", body)
    assert (status, problem["code"]) == (422, "invalid_name")
