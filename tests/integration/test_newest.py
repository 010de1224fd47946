"""A topic's messages, the newest first, a page at a time, over all of its queues."""

from __future__ import annotations

from typing import Any

from notify.testing import InMemoryServer
from tests.support.groups import publish
from tests.support.http import admin, ask


def pages(url: str, topic: str, size: int, **query: str) -> list[list[str]]:
    """The bodies of each page."""
    bodies: list[list[str]] = []
    before = ""
    while True:
        extra = "".join(f"&{name}={value}" for name, value in query.items())
        answer: Any = admin(url, "GET", f"messages?topic={topic}&newest=true&max={size}&before={before}{extra}")
        bodies.append([m["body"] for m in answer["messages"]])
        before = answer["next"]
        if not before:
            return bodies


def test_each_message_is_on_one_page(frozen_server: InMemoryServer, unique: str) -> None:
    """Also where many have the same time: those of one request do."""
    server = frozen_server
    admin(server.url, "PUT", f"topics/{unique}", {"queues": 3})
    sent: list[set[str]] = []
    for moment in range(4):
        batch = [f"{key}{moment}.{n}" for n in range(15) for key in "abc"]
        publish(server.url, unique, batch, key=True)
        sent.append(set(batch))
        server.advance(1)
    for size in (7, 45, 1000):
        found = pages(server.url, unique, size)
        assert all(len(page) <= size for page in found)
        bodies = [body for page in found for body in page]
        assert len(bodies) == len(set(bodies)) == 180
        for number, together in enumerate(reversed(sent)):
            assert {*bodies[number * 45 : (number + 1) * 45]} == together
        of_key = [body for body in bodies if body.startswith("a3")]
        assert of_key == sorted(of_key, key=lambda body: -float(body[3:]))
    now = admin(server.url, "GET", "overview")["at"]
    assert pages(server.url, unique, 10, **{"from": now}) == [[]]
    assert ask(server.url, "GET", f"/v1/admin/messages?topic={unique}&newest=true&before=x")[0] == 422
