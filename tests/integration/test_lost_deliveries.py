"""An answer with messages is lost on its way to a consumer: they come again at once, and no attempt counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from notify.client import AsyncConsumer, Consumer
from notify.testing import InMemoryServer
from tests.support.clock import eventually
from tests.support.groups import lag, publish, running, subscribe, taken_by
from tests.support.http import ask, post
from tests.support.proxy import Proxy


@pytest.fixture
def proxy(frozen_server: InMemoryServer) -> Iterator[Proxy]:
    """A proxy in front of a server whose leases do not end."""
    address = urlsplit(frozen_server.url)
    with Proxy(address.hostname or "", address.port or 0) as proxy:
        yield proxy


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_an_ordered_key_goes_on_after_a_lost_answer(
    frozen_server: InMemoryServer,
    proxy: Proxy,
    unique: str,
    kind: type[Consumer] | type[AsyncConsumer],
    batch: int | None,
) -> None:
    """Before, the key stood still until the end of a lease, and the message came as a second attempt."""
    publish(frozen_server.url, unique, ["a1", "a2"], key=True)
    got: list[tuple[str, int]] = []

    def note(messages: Any) -> None:
        got.extend([(m.text, m.attempt) for m in (messages if batch else [messages])])

    proxy.cut_at(rb"/receive", answer=True)
    consumer = kind(f"http://127.0.0.1:{proxy.port}", group=unique)
    consumer.subscribe(unique, mode="ordered", start="earliest", batch=batch)(taken_by(consumer, note))
    with running(consumer):
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
