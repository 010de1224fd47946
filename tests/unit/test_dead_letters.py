"""Searches through dead letters and jobs that redrive them: the server's other work goes on meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

from notify.cli import dead_letter
from notify.server.jobs.dead_letters import DeadLetters
from notify.server.jobs.runner import Jobs
from notify.server.jobs.wanted import LOOKED_AT_ONCE, Wanted
from notify.storage.records import StoredMessage
from notify.testing import InMemoryServer
from notify.wire import Payload, encode_msgpack
from tests.support.clock import eventually_async
from tests.support.commands import cli
from tests.support.groups import publish, subscribe
from tests.support.http import post

LETTERS = 20_000


class Letters:
    """A queue of dead letters that counts how many were read since the loop's last turn."""

    def __init__(self) -> None:
        payload = encode_msgpack(Payload("t", b"", None, None, {"notify-dead-letter-reason": "r"}, None))
        self.letter = SimpleNamespace(payload=payload, corrupt=False, committed_us=0)
        self.read_in_one_go = self.most = 0

    def has_topic(self, name: str) -> bool:
        return True

    def read(self, topic: str, queue: int, offset: int, limit: int, size: int) -> list[StoredMessage]:
        count = max(0, min(limit, LETTERS - offset))
        self.read_in_one_go += count
        self.most = max(self.most, self.read_in_one_go)
        return [SimpleNamespace(**vars(self.letter), offset=offset + n) for n in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("wanted", [Wanted(key="nobody"), Wanted(filter='key == "nobody"'), Wanted(contains="x")])
def test_a_search_yields(wanted: Wanted) -> None:
    """A search gives the loop a turn after each part. One through 60,000 letters held everyone up for 1.5 s."""

    async def run() -> Letters:
        letters = Letters()

        async def others() -> None:
            while True:
                letters.read_in_one_go = 0
                await asyncio.sleep(0)  # a turn of the loop

        beside = asyncio.create_task(others())
        search = DeadLetters(SimpleNamespace(queues=letters, one_search=asyncio.Lock()), "g")  # type: ignore[arg-type]
        assert await search.find(wanted, 0, 10) == ([], LETTERS)
        beside.cancel()
        return letters

    assert asyncio.run(run()).most <= 2 * LOOKED_AT_ONCE


def test_a_job_of_an_earlier_version_whose_filter_is_refused_now_fails_and_says_so() -> None:
    ended: list[tuple[str, str]] = []
    spec = {"group": "g", "wanted": {"filter": "headers.all(a, headers.all(b, true))"}, "from": 0, "until": 1}
    job = {"id": 1, "what": "redrive", "spec": spec, "position": 0, "done": 0}
    records = SimpleNamespace(
        job=lambda number: job,
        jobs=lambda most, state: [job],
        end_job=lambda number, state, detail, now_us: ended.append((state, detail)),
    )
    letters = SimpleNamespace()

    async def run() -> None:
        jobs = Jobs(records, SimpleNamespace(), letters, int)  # type: ignore[arg-type]
        await jobs.resume()
        await eventually_async(lambda: ended, "the job to end")

    asyncio.run(run())
    ((state, detail),) = ended
    assert state == "failed" and "macro" in detail


def test_letters_of_one_message_in_two_groups_are_both_sent_again() -> None:
    """Both are sent. The second counted as sent already: its offset in its group's letters was the first one's."""
    with InMemoryServer() as server:
        for group in ("a", "b"):
            subscribe(server.url, group, "t")
        publish(server.url, "t", ["body"])
        asked = {"instance": "i", "max": 1, "wait": 60, "lease": 60}
        for group in ("a", "b"):
            first = post(server.url, f"/v1/groups/{group}/receive", asked)["messages"][0]
            items = [{"receipt": first["receipt"], "action": "dead_letter", "reason": "r"}]
            post(server.url, f"/v1/groups/{group}/settle", {"items": items})
        for group in ("a", "b"):
            post(server.url, f"/v1/admin/groups/{group}/dead-letters/redrive", {"reason": "r"})
            again = post(server.url, f"/v1/groups/{group}/receive", asked)["messages"]
            assert [message["body"] for message in again] == ["body"], group


@pytest.mark.parametrize("ends_with", ["w:7,x:-", 90])
def test_the_command_looks_behind_empty_pages(monkeypatch: pytest.MonkeyPatch, ends_with: str | int) -> None:
    """Over Kafka a page may be empty although letters follow: the command said that there was none."""
    letter = {"id": "m1", "dead_at": "2026-11-26T00:00:00Z", "topic": "t", "redriven": False}
    pages: dict[str, dict[str, Any]] = {
        "0": {"messages": [], "next_offset": ends_with},
        str(ends_with): {"messages": [letter], "next_offset": 91},
    }

    def call(url: str, method: str, *parts: str, query: str) -> dict[str, Any]:
        return pages[parse_qs(query.removeprefix("?"))["offset"][0]]

    monkeypatch.setattr(dead_letter, "call", call)
    assert cli("dead-letter", "list", "g", "--json") == (0, pages[str(ends_with)])


@pytest.mark.parametrize("end", [0, 90])
def test_the_command_ends_at_the_list_s_end(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    """One server's list ends where its offset does not move; the list of workers says 0."""
    asked: list[str] = []

    def call(url: str, method: str, *parts: str, query: str = "") -> dict[str, Any]:
        asked.append(query)
        assert len(asked) < 9, "it asks without an end"
        return {"messages": [], "next_offset": 90 if len(asked) == 1 else end}

    monkeypatch.setattr(dead_letter, "call", call)
    assert cli("dead-letter", "list", "g", "--json") == (0, {"messages": [], "next_offset": end})
    assert asked == ["?max=100&offset=0", "?max=100&offset=90", ""]
