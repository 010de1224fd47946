"""A topic's messages, the newest first, a page at a time, over all queues; and topics and groups by their figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from notify.admin_api.queue_rows import GROUP_SORTS
from notify.protocol.limits import LIMITS
from notify.testing import InMemoryServer
from tests.support.groups import Caller, bodies, die, publish, subscribe
from tests.support.http import admin, ask, call, refusal


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


def test_topics_are_listed_with_their_newest_message_and_by_their_figures(
    frozen_server: InMemoryServer, unique: str
) -> None:
    server = frozen_server
    counts = {"a": 3, "b": 9, "c": 0, "d": 5}
    for name in counts:
        admin(server.url, "PUT", f"topics/{unique}.{name}", {"queues": 2})
    server.inside(lambda running: running.figures.sample())
    for name, count in counts.items():
        server.advance(20)
        if count:
            publish(server.url, f"{unique}.{name}", ["x"] * count)
    subscribe(server.url, unique, f"{unique}.a", start="earliest")
    server.inside(lambda running: running.figures.sample())

    def listed(query: str) -> list[Any]:
        rows: list[Any] = admin(server.url, "GET", f"topics?prefix={unique}&{query}")["topics"]
        return rows

    def names(query: str) -> str:
        return "".join(row["name"][-1] for row in listed(query))

    rows = listed("")
    assert [row["per_second"] for row in rows] == [pytest.approx(count / 80, abs=0.001) for count in counts.values()]
    assert rows[2]["newest_at"] is None and rows[0]["newest_at"] < rows[1]["newest_at"] < rows[3]["newest_at"]
    assert names("") == "abcd" and names("sort=rate&max=2") == "bd" and names("sort=kept") == "bdac"
    assert names("sort=lag")[0] == "a" and names("sort=sent&max=1") == "b"
    assert refusal(server.url, "GET", "topics?sort=sent&after=x") == (422, "invalid_query")
    assert refusal(server.url, "GET", "topics?sort=colour")[0] == 422
    figures = admin(server.url, "GET", f"topics/{unique}.b/history?span=day")
    assert figures["sent"][-1] == pytest.approx(9 / 80, abs=0.001) and figures["step_seconds"] == 900
    figures = admin(server.url, "GET", f"groups/{unique}/history")
    assert figures["lag"][-1] == 3 and figures["oldest_seconds"][-1] == 60
    assert refusal(server.url, "GET", f"topics/{unique}.none/history")[0] == 404
    assert refusal(server.url, "GET", f"groups/{unique}.none/history")[0] == 404
    assert "lag" in admin(server.url, "GET", "history?span=day")


def test_groups_are_listed_by_their_figures(frozen_server: InMemoryServer, unique: str) -> None:
    """The groups that need an operator come first: one without consumers, then one with the oldest message."""
    server, url = frozen_server, frozen_server.url
    sent = {"a": 2, "b": 9, "c": 4, "d": 1}
    callers = {name: Caller(url, f"{unique}.{name}", "i") for name in "abc"}
    for name in sent:
        subscribe(url, f"{unique}.{name}", f"{unique}.{name}", max_attempts=1)
    server.inside(lambda running: running.figures.sample())
    for name, count in sent.items():
        server.advance(10)
        publish(url, f"{unique}.{name}", ["x"] * count)
    callers["c"].settle(callers["c"].receive(f"{unique}.c", max=3))
    die(callers["c"], f"{unique}.c", 1, "no such customer")
    for name in "ab":
        callers[name].receive(f"{unique}.{name}", max=1)
    server.advance(20)
    server.inside(lambda running: running.figures.sample())

    def names(query: str) -> str:
        rows = admin(url, "GET", f"groups?prefix={unique}&{query}")["groups"]
        return "".join(row["name"][-1] for row in rows)

    orders = {"name": "abcd", "pain": "dcab", "lag": "badc", "oldest": "abdc", "in": "bcad", "out": "cabd",
              "p99": "cabd", "dead_letters": "cabd", "consumers": "abcd"}  # fmt: skip
    assert {sort: names(f"sort={sort}") for sort in orders} == orders and {"name", *GROUP_SORTS} == orders.keys()
    assert names("sort=lag&max=2") == "ba" and names("max=2") == "ab"
    (row,) = admin(url, "GET", f"groups?prefix={unique}.c")["groups"]
    assert row["dead_letters"] == 1 and row["lag"] == 0 and row["oldest_seconds"] is None
    assert row["arrived_per_second"] == row["settled_per_second"] == pytest.approx(4 / 60, abs=0.001)
    assert refusal(url, "GET", "groups?sort=lag&after=x") == (422, "invalid_query")
    assert refusal(url, "GET", "groups?sort=colour")[0] == 422


def test_dead_letters_are_listed_newest_first(frozen_server: InMemoryServer, unique: str) -> None:
    url = frozen_server.url
    subscribe(url, unique, unique, max_attempts=1)
    publish(url, unique, [str(n) for n in range(50)])
    caller = Caller(url, unique, "i")
    for n in range(50):
        die(caller, unique, 1, "even" if n % 2 == 0 else "odd")
    seen: list[str] = []
    before = 0
    while True:
        path = f"groups/{unique}/dead-letters?newest=true&contains=even&max=10&before={before}"
        answer = admin(url, "GET", path)
        seen += bodies(answer["messages"])
        before = answer["next_before"]
        if not before:
            break
    assert seen == [str(n) for n in reversed(range(0, 50, 2))]
    assert admin(url, "GET", f"groups/{unique}-none/dead-letters?newest=true") == {"messages": [], "next_before": 0}
    assert refusal(url, "GET", f"groups/{unique}/dead-letters?newest=true&before=-1")[0] == 422


def test_lists_of_messages_are_bounded_in_bytes(
    frozen_server: InMemoryServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had all that `max` allows: 10,000 messages of 1 MiB."""
    url = frozen_server.url
    for module in ("admin.messages", "letters.letters"):
        monkeypatch.setattr(f"notify.server.{module}.LIMITS", replace(LIMITS, reply_bytes=25_000))
    admin(url, "PUT", f"topics/{unique}", {"queues": 4})
    subscribe(url, unique, unique)
    sent = [
        {"topic": unique, "body": f"{n}" + "x" * 10_000, "key": "k" if n < 6 else f"{unique}{n}"} for n in range(12)
    ]
    call(url, "POST", "/v1/messages", {"messages": sent})
    by_key = admin(url, "GET", f"messages?key=k&topic={unique}")
    assert ([m["body"][0] for m in by_key["messages"]], by_key["is_more"]) == (["0", "1"], True)
    by_time = admin(url, "GET", f"messages?topic={unique}&max=100")
    assert (len(by_time["messages"]), by_time["is_more"]) == (2, True)
    assert "is_more" not in admin(url, "GET", f"messages?topic={unique}&max=2")
    caller = Caller(url, unique, "i")
    caller.settle(caller.receive(unique, max=12), "dead_letter", reason="bad")
    listed: list[str] = []
    offset = 0
    while page := admin(url, "GET", f"groups/{unique}/dead-letters?max=100&offset={offset}")["messages"]:
        listed += [m["body"] for m in page]
        offset = page[-1]["offset"] + 1
    assert sorted(listed) == sorted(m["body"] for m in sent)
    newest = admin(url, "GET", f"groups/{unique}/dead-letters?newest=true&max=100")
    assert len(newest["messages"]) == 3 and newest["next_before"]
