"""Searches through dead letters and jobs that redrive them: the server's other work continues meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

from notify.cli import dead_letter, writes
from notify.protocol.wire import Payload, encode_msgpack
from notify.server.groups import own_letters
from notify.server.groups.own_letters import LOOKED_AT, OwnLetters
from notify.server.jobs.runner import Jobs
from notify.server.letters import query, search
from notify.server.letters.engine import LOOKED_AT_ONCE
from notify.server.letters.failures import MOST_FAILURES, MOST_TOPICS, Failures, kind_of
from notify.server.letters.letters import Letters
from notify.server.letters.query import Chosen, LetterQuery
from notify.server.letters.search import SEARCH_SECONDS
from notify.server.message_pages import CHUNK
from notify.server.rate import ShareOfTime
from notify.storage.records import StoredMessage
from notify.testing import InMemoryServer
from tests.support.clock import eventually_async
from tests.support.commands import cli
from tests.support.groups import Caller, die, publish, subscribe
from tests.support.http import call, post

LETTERS = 50_000


class Queue:
    """A queue of dead letters that counts how many were read or asked about, in all and since the loop's last turn."""

    def __init__(self) -> None:
        payload = encode_msgpack(Payload("t", b"", None, None, {"notify-dead-letter-reason": "r"}, None))
        self.letter = SimpleNamespace(
            payload=payload, corrupt=False, committed_us=0, topic="t", queue=0, transaction_id=bytes(16), message_no=0
        )
        self.read_in_all = self.in_one_go = self.most = self.reads = self.counts = 0

    def has_topic(self, name: str) -> bool:
        return True

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        return 0, LETTERS

    def count(self, topic: str, queue: int, first: int, end: int) -> int:
        self.counts += 1
        return end - first

    def read(self, topic: str, queue: int, offset: int, limit: int, size: int) -> list[StoredMessage]:
        count = max(0, min(limit, LETTERS - offset))
        self.read_in_all += count
        self.reads += 1
        self._note(count)
        return [SimpleNamespace(**vars(self.letter), offset=offset + n) for n in range(count)]  # type: ignore[misc]

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        return []

    async def states(self, transaction_ids: list[bytes]) -> list[None]:
        self._note(len(transaction_ids))
        return [None] * len(transaction_ids)

    def _note(self, count: int) -> None:
        self.in_one_go += count
        self.most = max(self.most, self.in_one_go)


def searched(
    does: Callable[[Letters[Any]], Awaitable[Any]], monotonic: Callable[[], float] = lambda: 0.0
) -> tuple[Queue, Any]:
    """(the letters after a search beside which the loop has other work, the search's result). `monotonic`: the clock of
    its bound; by default a search takes no time."""

    async def run() -> tuple[Queue, Any]:
        letters = Queue()

        async def others() -> None:
            while True:
                letters.in_one_go = 0
                await asyncio.sleep(0)  # a turn of the loop

        beside = asyncio.create_task(others())
        core = SimpleNamespace(queues=letters, searches=ShareOfTime(0.15))
        engine = OwnLetters(core)  # type: ignore[arg-type]
        result = await does(Letters(engine, engine.counts, monotonic))
        beside.cancel()
        return letters, result

    return asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize(
    "conditions", [LetterQuery(key="nobody"), LetterQuery(filter='key == "nobody"'), LetterQuery(contains="x")]
)
def test_a_search_through_letters_gives_the_loop_its_turns(conditions: LetterQuery) -> None:
    """A search gives the loop a turn after each part. One through 60,000 letters held everyone up for 1.5 s."""
    letters, page = searched(lambda own: own.listed("g", conditions, 0, 10))
    assert page["messages"] == []
    assert letters.most <= 2 * LOOKED_AT_ONCE


@pytest.mark.long
@pytest.mark.parametrize("newest", [True, False])
def test_a_list_of_many_letters_yields(newest: bool) -> None:
    """Whether letters were sent again was asked about all of a list at once: 10,000 held everyone up for 1.6 s."""
    letters, page = searched(
        lambda own: own.newest("g", LetterQuery(), 0, 10_000) if newest else own.listed("g", LetterQuery(), 0, 10_000)
    )
    assert len(page["messages"]) == 10_000
    assert letters.most <= 4 * LOOKED_AT_ONCE


def test_the_newest_letters_are_looked_at_a_few_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 letters, of up to a megabyte each, were read and held in one go."""
    monkeypatch.setattr(own_letters, "LOT_BYTES", 1)
    letters, page = searched(lambda own: own.newest("g", LetterQuery(), 0, 100))
    assert len(page["messages"]) == 100
    assert letters.most <= 2 * CHUNK


def test_a_page_of_the_newest_letters_costs_a_few_reads() -> None:
    """The place of each 16 letters was searched for by bisection: 110 counts for a page of 100 among 50,000."""
    letters, page = searched(lambda own: own.newest("g", LetterQuery(), 0, 100))
    assert len(page["messages"]) == 100
    assert letters.reads == letters.counts - 1 == math.ceil(100 / CHUNK)  # and one count for the bounds


SEARCHES: dict[str, Callable[[Letters[Any], int], Awaitable[Any]]] = {
    "list": lambda own, place: own.listed("g", LetterQuery(key="nobody"), place, 10),
    "newest": lambda own, place: own.newest("g", LetterQuery(key="nobody"), place, 10),
    "redrive": lambda own, place: own.redrive("g", Chosen(None, LetterQuery(key="nobody"), 10, offset=place)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SEARCHES)
def test_one_request_looks_at_a_bounded_number_of_letters(name: str) -> None:
    """A search went through all letters: 60,000 took 163 s on a busy machine. The answer says where to continue."""
    place, looked_at = 0, []
    while len(looked_at) < 9:
        letters, answer = searched(lambda own, place=place: SEARCHES[name](own, place))  # type: ignore[misc]
        looked_at.append(letters.read_in_all)
        fields = answer.preview if name == "redrive" else answer
        earlier, place = place, fields["next_before" if name == "newest" else "next_offset"]
        if place in (0, earlier):
            break
    assert max(looked_at) < LOOKED_AT + LOOKED_AT_ONCE
    assert LETTERS <= sum(looked_at) < LETTERS + 3 * LOOKED_AT_ONCE


@pytest.mark.parametrize("name", SEARCHES)
def test_one_request_looks_for_a_bounded_time(name: str) -> None:
    """Each part of the search takes a second here. The answer says where to continue."""
    seconds = itertools.count()
    letters, answer = searched(lambda own: SEARCHES[name](own, 0), lambda: float(next(seconds)))
    fields = answer.preview if name == "redrive" else answer
    assert letters.read_in_all <= (SEARCH_SECONDS + 1) * LOOKED_AT_ONCE
    looked_at = round(SEARCH_SECONDS) * LOOKED_AT_ONCE
    if name == "newest":
        assert fields["next_before"] == LETTERS - looked_at
    else:
        assert fields["next_offset"] == looked_at


async def test_a_job_of_an_earlier_version_whose_filter_is_refused_now_fails_and_says_so() -> None:
    ended: list[tuple[str, str]] = []
    spec = {"group": "g", "wanted": {"filter": "headers.all(a, headers.all(b, true))"}, "from": 0, "until": 1}
    job = {"id": 1, "what": "redrive", "spec": spec, "position": 0, "done": 0}
    records = SimpleNamespace(
        job=lambda number: job,
        jobs=lambda most, state: [job],
        end_job=lambda number, state, detail, now_us: ended.append((state, detail)),
    )
    letters = SimpleNamespace()
    jobs = Jobs(records, SimpleNamespace(), letters, int)  # type: ignore[arg-type]
    await jobs.resume()
    await eventually_async(lambda: ended, "the job to end")
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


def test_commands_go_on_where_a_search_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list and the redrive are whole although the server looks at two letters for each answer."""
    monkeypatch.setattr(search, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(query, "LOOKED_AT_ONCE", 2)
    with InMemoryServer() as server:
        subscribe(server.url, "g", "t")
        publish(server.url, "t", [str(n) for n in range(9)])
        caller = Caller(server.url, "g", "i")
        for reason in ("no", "other", "no"):
            die(caller, "t", 3, reason)
        path = "/v1/admin/groups/g/dead-letters"
        assert len(call(server.url, "GET", f"{path}?max=100")["messages"]) == 2
        newest: list[str] = []
        before = 0
        while True:
            page = call(server.url, "GET", f"{path}?newest=true&contains=no&before={before}")
            newest += [letter["body"] for letter in page["messages"]]
            before = page["next_before"]
            if not before:
                break
        assert newest == ["8", "7", "6", "2", "1", "0"]
        for most, count in ((100, 9), (5, 5)):
            code, listed = cli("dead-letter", "list", "g", "--max", str(most), "--url", server.url, "--json")
            assert (code, [letter["body"] for letter in listed["messages"]]) == (0, [str(n) for n in range(count)])
        how = ("--contains", "no", "--url", server.url, "--reason", "r", "--json")
        code, shown = cli("dead-letter", "redrive", "g", "--dry-run", *how)
        assert (code, len(shown["result"]["ids"])) == (0, 6)
        code, sent = cli("dead-letter", "redrive", "g", "--max", "4", *how)
        assert (code, [item["id"] for item in sent["result"]["items"]]) == (0, shown["result"]["ids"][:4])
        code, sent = cli("dead-letter", "redrive", "g", *how)
        assert (code, [item["id"] for item in sent["result"]["items"]]) == (0, shown["result"]["ids"][4:])
        assert [item["status"] for item in sent["result"]["items"]] == [201, 201]


@pytest.mark.parametrize("ends_with", ["w:7,x:-", 90])
def test_the_command_looks_behind_empty_pages(monkeypatch: pytest.MonkeyPatch, ends_with: str | int) -> None:
    """Over Kafka a page may be empty although letters follow: the command said that there was none."""
    letter = {"id": "m1", "dead_at": "2026-11-26T00:00:00Z", "topic": "t", "redriven": False}
    pages: dict[str, dict[str, Any]] = {
        "0": {"messages": [], "next_offset": ends_with},
        str(ends_with): {"messages": [letter], "next_offset": 91},
        "91": {"messages": [], "next_offset": 91},
    }

    def answer(url: str, method: str, *parts: str, query: str) -> dict[str, Any]:
        return pages[parse_qs(query.removeprefix("?"))["offset"][0]]

    monkeypatch.setattr(dead_letter, "call", answer)
    assert cli("dead-letter", "list", "g", "--json") == (0, {"messages": [letter], "next_offset": 91})


@pytest.mark.parametrize("end", [0, 90])
def test_the_command_ends_at_the_list_s_end(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    """One server's list ends where its offset does not move; the list of workers says 0."""
    asked: list[str] = []

    def answer(url: str, method: str, *parts: str, query: str = "") -> dict[str, Any]:
        asked.append(query)
        assert len(asked) < 9, "it asks without an end"
        return {"messages": [], "next_offset": 90 if len(asked) == 1 else end}

    monkeypatch.setattr(dead_letter, "call", answer)
    assert cli("dead-letter", "list", "g", "--json") == (0, {"messages": [], "next_offset": end})
    assert asked == ["?max=100&offset=0", "?max=100&offset=90", ""]


def test_commands_look_for_ids_in_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the answer that has seen the last letter refuses an id: it does not know what an earlier one found."""
    answers = [
        {"items": [{"id": "a", "status": 204}], "next_offset": 10},
        {"items": [], "next_offset": 20},
        {"items": [{"id": "c", "status": 200}] + [{"id": i, "status": 404} for i in "ab"], "next_offset": 0},
    ]
    sent: list[tuple[Any, Any, Any]] = []

    def answer(url: str, method: str, *parts: str, body: dict[str, Any], here: bool = False) -> dict[str, Any]:
        sent.append((parts[-1], body["ids"], body.get("offset")))
        return {"target": "g", "dry_run": False, "result": answers[len(sent) - 1]}

    monkeypatch.setattr(writes, "call", answer)
    ids = [word for name in "abc" for word in ("--id", name)]
    code, dropped = cli("dead-letter", "drop", "g", *ids, "--reason", "r", "--json")
    assert [(item["id"], item["status"]) for item in dropped["result"]["items"]] == [("a", 204), ("c", 200), ("b", 404)]
    assert code == 1
    assert sent == [("drop", ["a", "b", "c"], offset) for offset in (None, 10, 20)]


# --- failure groups: what dead letters have in common is told by their reasons, and a bounded number of groups is kept


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ValueError: no 7 (at shop.add:41)", "ValueError: gone (at shop.add:57)", True),
        ("ValueError: no 7 (at shop.add:41)", "KeyError: no 7 (at shop.add:41)", False),
        ("ValueError: no 7 (at shop.add:41)", "ValueError: no 7 (at shop.pay:41)", False),
        ("no customer 7", "no customer 12345", True),
        ("no customer 'Ann'", "no customer 'Bob Lee'", True),
        ("no customer", "no order", False),
        ("3 attempts, the last one's lease ran out", "16 attempts, the last one's lease ran out", True),
        ("order 019aa4b7-0000-7000-8000-000000000001", "order 019aa4b7-ffff-7000-8000-00000000abcd", True),
        ("", "", True),
    ],
)
def test_letters_of_one_cause_have_one_fingerprint(one: str, other: str, same: bool) -> None:
    assert (kind_of(one).fingerprint == kind_of(other).fingerprint) == same


def test_a_reason_is_taken_apart() -> None:
    kind = kind_of("sqlalchemy.exc.DataError: 'x' is too long, (at shop.points.add.<locals>.inner:41)")
    assert (kind.type, kind.place) == ("sqlalchemy.exc.DataError", "shop.points.add.<locals>.inner")
    assert kind.text == "# is too long,"
    assert kind_of("(at the end)").place == "" == kind_of("two words: no type").type


def test_no_reason_takes_long() -> None:
    """A reason is whatever a consumer sends."""
    began = time.thread_time()
    for text in ("'" * 500, '"a' * 250, "a1-" * 166, " (at a" * 83, "(at " + "x" * 490 + ":1)", "A." * 250):
        kind_of(text)
    assert time.thread_time() - began < 0.5


def test_failures_are_counted_within_bounds() -> None:
    failures = Failures()
    for n in range(MOST_FAILURES + 5):
        for topic in range(MOST_TOPICS + 5):
            place = f"E: x (at shop.f{n}:{topic + 1})"
            failures.note(place, f"{n}.{topic}", f"t{topic}", 100 + topic, is_closed=topic == 0, may_grow=True)
    assert (len(failures.by_fingerprint), failures.others) == (MOST_FAILURES, 5 * (MOST_TOPICS + 5))
    failures.closed("E: x (at shop.f7:9)")
    first = failures.listed()[0]
    assert (first.count, first.closed, len(first.topics)) == (MOST_TOPICS + 5, 1, MOST_TOPICS)
    assert (first.first_us, first.last_us, first.example_id) == (100, 114, f"{first.example_id.split('.')[0]}.14")
    assert failures.listed()[-1].kind.place == "shop.f7"
    failures.note("a new cause", "id", "t", 1, is_closed=False, may_grow=False)
    assert failures.others == 5 * (MOST_TOPICS + 5) + 1
