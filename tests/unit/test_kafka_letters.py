"""Dead letters over Kafka without brokers: the newest first in pages, and causes counted letter by letter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from notify.kafka import groups, records
from notify.server.groups.kafka import dead_letters
from notify.server.groups.kafka.dead_letters import PART_SECONDS, KafkaLetters
from notify.server.groups.kafka.letters import KafkaLetter
from notify.server.letters import failures, search
from notify.server.letters.failures import LetterCounts
from notify.server.letters.letters import Letters
from notify.server.letters.query import Chosen, LetterQuery
from notify.server.letters.search import SEARCH_SECONDS

PARTITIONS = 2


def letter(number: int, reason: str = "ValueError: no (at shop.add:1)", size: int = 1) -> KafkaLetter:
    headers: records.Headers = [(records.ID, f"m{number}".encode()), (records.REASON, reason.encode())]
    return KafkaLetter(number % PARTITIONS, number // PARTITIONS, number, number, headers, b"k", b"x" * size)


class World:
    """A group that has these letters, without Kafka: calls are made at once, and counted. Time passes by calls and by
    letters that are read."""

    def __init__(self, held: list[KafkaLetter]) -> None:
        self.held = held
        self.closed: set[int] = set()
        self.calls = 0
        self.now = self.call_seconds = self.letter_seconds = 0.0
        self.read: list[int] = []
        self.starts = [0] * PARTITIONS
        self.engine: Any = KafkaLetters.__new__(KafkaLetters)
        self.engine._monotonic = lambda: self.now
        self.engine._thread = self
        self.engine._look = SimpleNamespace(now=lambda: self, again=lambda: self)
        self.engine._letters = self._letters
        self.engine._partitions = lambda group: PARTITIONS
        self.engine._redriven = SimpleNamespace(
            read=lambda: None,
            sent=lambda group: {x.spot: x.id for x in self.held if x.number in self.closed},
            dropped=lambda group: {},
            send=lambda group, letters: [201] * len(letters),
            drop=lambda group, letters, why: [204] * len(letters),
        )
        self.topics = {groups.dead_letter_topic("g"): PARTITIONS, groups.retry_topic("g"): 1}
        self.counts: LetterCounts[KafkaLetter] = LetterCounts(self.engine)
        self.engine.counts = self.counts
        self.letters: Letters[KafkaLetter] = Letters(self.engine, self.counts, lambda: self.now)

    async def call(self, function: Callable[[], Any], seconds: float = 0.0) -> Any:
        self.calls += 1
        try:
            return function()
        finally:
            self.now += self.call_seconds

    def letters_of(self, group: str) -> dict[int, tuple[int, int]]:
        ends = [max((x.offset + 1 for x in self.held if x.partition == p), default=0) for p in range(PARTITIONS)]
        return {p: (self.starts[p], ends[p]) for p in range(PARTITIONS)}

    def _letters(self, group: str, number: int) -> Iterator[KafkaLetter]:
        for x in self.held:
            if x.number >= number:
                self.read.append(x.number)
                self.now += self.letter_seconds
                yield x


def ids(page: dict[str, Any]) -> list[str]:
    return [shown["id"] for shown in page["messages"]]


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_pages_of_the_newest_have_every_letter_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """There are gaps between numbers, as the records of transactions leave them, and windows smaller than a page."""
    monkeypatch.setattr(dead_letters, "FIRST_WINDOW", 4)
    monkeypatch.setattr(dead_letters, "LARGEST_WINDOW", 16)
    monkeypatch.setattr(search, "LOT_BYTES", 20_000)
    held = [letter(number, size=200 if number % 5 else 5_000) for number in range(10, 90) if number % 7]
    world, before, found, pages = World(held), 0, [], 0
    while True:
        page = asyncio.run(world.letters.newest("g", LetterQuery(), before, most))
        found += ids(page)
        pages, before = pages + 1, page["next_before"]
        assert len(page["messages"]) <= most and pages < 200
        if not before:
            break
    assert found == [x.id for x in reversed(held)]


@pytest.mark.parametrize("newest", [True, False])
def test_a_search_looks_for_a_bounded_time(newest: bool) -> None:
    """It answers, and the next one continues where it ended."""
    world = World([letter(number) for number in range(20_000)])
    world.call_seconds = SEARCH_SECONDS
    wanted = LetterQuery(contains="nothing like it")
    if newest:
        page = asyncio.run(world.letters.newest("g", wanted, 0, 10))
        assert page == {"messages": [], "next_before": 20_000 - dead_letters.FIRST_WINDOW}
    else:
        page = asyncio.run(world.letters.listed("g", wanted, 0, 10))
        assert page == {"messages": [], "next_offset": 20_000}


def test_causes_are_counted_some_at_a_time_and_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that other servers close."""
    monkeypatch.setattr(failures, "LOOKED_AT", 4)
    monkeypatch.setattr(failures, "MOST_LETTERS", 9)
    world = World([letter(n, "KeyError: 'a'" if n % 2 else "ValueError: no (at shop.add:1)") for n in range(12)])

    def look() -> dict[str, Any]:
        return asyncio.run(world.letters.failures("g"))

    def open_of(shown: dict[str, Any]) -> dict[str, int]:
        return {row["type"]: row["open"] for row in shown["failures"]}

    first = look()
    assert (first["looked_at"], first["of"], open_of(first)) == (4, 12, {"ValueError": 2, "KeyError": 2})
    world.closed.update({0, 5})
    assert open_of(look()) == {"ValueError": 3, "KeyError": 3}
    last = look()
    assert (last["looked_at"], open_of(last), world.read) == (9, {"ValueError": 4, "KeyError": 3}, list(range(9)))
    world.closed.add(1)
    assert open_of(look()) == {"ValueError": 4, "KeyError": 2}
    world.starts[0] = 1
    assert look()["looked_at"] == 4, "after a purge it starts over"


def test_letters_are_held_without_their_content() -> None:
    kept = letter(3, size=1_000_000).alone()
    assert (kept.id, kept.spot, kept.size < 1000) == ("m3", letter(3).spot, True)
    assert kept.headers == [(records.ID, b"m3")]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_list_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """It had all that `max` allows, 10,000 letters of a megabyte."""
    monkeypatch.setattr(search, "LOT_BYTES", 20_000)
    monkeypatch.setattr(dead_letters, "PART_LETTERS", 10)
    monkeypatch.setattr("notify.server.letters.letters.LIMITS", SimpleNamespace(reply_bytes=20_000))
    held = [letter(number, size=200 if number % 5 else 15_000) for number in range(10, 90) if number % 7]
    world, offset, found = World(held), 0, []
    while (page := asyncio.run(world.letters.listed("g", LetterQuery(), offset, most)))["next_offset"] > offset:
        offset = page["next_offset"]
        found += ids(page)
        assert len(page["messages"]) <= most
        assert sum(len(m["body"]) + 500 for m in page["messages"]) < 20_000 + 16_000
    assert found == [x.id for x in held]


def test_a_search_goes_on_from_part_to_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stopped at an empty page missed the letters behind those that one call looks at."""
    monkeypatch.setattr(dead_letters, "PART_LETTERS", 10)
    world = World([letter(number, "found" if number == 73 else "else") for number in range(90)])
    page = asyncio.run(world.letters.listed("g", LetterQuery(contains="found"), 0, 5))
    assert (ids(page), page["next_offset"]) == (["m73"], 90)
    page = asyncio.run(world.letters.listed("g", LetterQuery(contains="found"), 90, 5))
    assert page == {"messages": [], "next_offset": 90}


def test_a_search_that_takes_long_answers_and_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "PART_LETTERS", 10)
    world = World([letter(number, "found" if number == 13 else "else") for number in range(90)])
    world.call_seconds = SEARCH_SECONDS
    page = asyncio.run(world.letters.listed("g", LetterQuery(contains="found"), 0, 5))
    assert page == {"messages": [], "next_offset": 10}
    assert ids(asyncio.run(world.letters.listed("g", LetterQuery(contains="found"), 10, 5))) == ["m13"]


def carried_out(change: Any) -> Any:
    return asyncio.run(change.do())


def test_a_redrive_by_conditions_goes_on_from_request_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read all letters in one call: with many it was refused after 10 s, however often it was repeated."""
    monkeypatch.setattr(dead_letters, "PART_LETTERS", 10)
    world = World([letter(n, "found" if n in (3, 4, 25, 26, 27) else "else") for n in range(33)])
    world.closed, world.call_seconds = {4}, SEARCH_SECONDS
    chosen: list[tuple[list[str], int]] = []
    offset = 0
    while len(chosen) < 9:
        wanted = Chosen(None, LetterQuery(contains="found"), 2, offset=offset)
        change = asyncio.run(world.letters.redrive("g", wanted))
        offset = change.preview["next_offset"]
        chosen.append((change.preview["ids"], offset))
        items = [{"id": name, "status": 201} for name in change.preview["ids"]]
        assert carried_out(change) == {"items": items, "next_offset": offset}
        if not offset:
            break
    assert chosen == [(["m3"], 10), ([], 20), (["m25", "m26"], 27), (["m27"], 0)]


@pytest.mark.parametrize("does", ["redrive", "drop"])
def test_ids_are_looked_for_from_request_to_request(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """The request that has seen the last letter refuses the ids that it did not find, and none before it does."""
    monkeypatch.setattr(dead_letters, "PART_LETTERS", 10)
    world = World([letter(number) for number in range(25)])
    world.closed, world.call_seconds = {12}, SEARCH_SECONDS

    def answer(names: tuple[str, ...], offset: int) -> tuple[list[tuple[str, int]], int]:
        if does == "redrive":
            change = asyncio.run(world.letters.redrive("g", Chosen(names, LetterQuery(), 100, offset=offset)))
        else:
            change = asyncio.run(world.letters.drop("g", names, "of no use", offset))
        read = list(world.read)
        result = carried_out(change)
        world.read = read
        assert change.preview["next_offset"] == result["next_offset"]
        return [(item["id"], item["status"]) for item in result["items"]], result["next_offset"]

    new = 201 if does == "redrive" else 204
    names = ("m3", "m12", "none")
    assert answer(names, 0) == ([("m3", new)], 10)
    assert answer(names, 10) == ([("m12", new)], 20)  # it is closed: the same message may have an open letter as well
    items, following = answer(names, 20)
    assert (dict(items)["none"], following) == (404, 0)
    world.read = []
    assert answer(("m2", "m5"), 1) == ([("m2", new), ("m5", new)], 0)
    assert world.read == [1, 2, 3, 4, 5], "all were found"


def test_a_part_ends_after_its_time() -> None:
    """Letters may have a megabyte each: between two parts others get their turn."""
    world = World([letter(number) for number in range(9)])
    world.letter_seconds = PART_SECONDS / 4
    change = asyncio.run(world.letters.redrive("g", Chosen(None, LetterQuery(), 100)))
    assert change.preview["ids"] == [f"m{n}" for n in range(9)] and change.preview["next_offset"] == 0
    assert world.calls == 1 + 2 * 3  # the first one asks for the group; a part is read, and its fates
