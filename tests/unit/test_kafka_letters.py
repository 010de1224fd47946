"""Dead letters over Kafka without brokers: the newest first in pages, and causes counted letter by letter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

from notify.kafka import records
from notify.server.groups import Chosen
from notify.server.groups.kafka import dead_letters, letter_failures, letter_search
from notify.server.groups.kafka.dead_letters import KafkaLetters
from notify.server.groups.kafka.letter_failures import LetterFailures
from notify.server.groups.kafka.letter_search import PART_SECONDS
from notify.server.groups.kafka.letters import Letter
from notify.server.jobs.letter_query import SEARCH_SECONDS, LetterQuery

PARTITIONS = 2


def letter(number: int, reason: str = "ValueError: no (at shop.add:1)", size: int = 1) -> Letter:
    headers: records.Headers = [(records.ID, f"m{number}".encode()), (records.REASON, reason.encode())]
    return Letter(number % PARTITIONS, number // PARTITIONS, number, number, headers, b"k", b"x" * size)


def letters_of(held: list[Letter]) -> Any:
    """Letters of a group that reads these."""
    made = KafkaLetters.__new__(KafkaLetters)
    made._monotonic = lambda: 0.0  # reading takes no time
    made._letters = lambda name, number: iter([x for x in held if x.number >= number])  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_pages_of_the_newest_have_every_letter_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """There are gaps between numbers, as the records of transactions leave them, and windows smaller than a page."""
    monkeypatch.setattr(dead_letters, "FIRST_WINDOW", 4)
    monkeypatch.setattr(dead_letters, "LARGEST_WINDOW", 16)
    held = [letter(number, size=200 if number % 5 else 5_000) for number in range(10, 90) if number % 7]
    monkeypatch.setattr(dead_letters, "HELD_BYTES", 20_000)
    group, before, numbers, pages = letters_of(held), 200, [], 0
    while True:
        page, before = group._newest("g", LetterQuery(), (10, before), most)
        numbers += [x.number for x in page]
        pages += 1
        assert len(page) <= most and pages < 200
        if not before:
            break
    assert numbers == [x.number for x in reversed(held)]


def test_a_search_for_the_newest_looks_at_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "FIRST_WINDOW", 10)
    monkeypatch.setattr(dead_letters, "LOOKED_AT", 100)
    group = letters_of([letter(number) for number in range(1000)])
    page, before = group._newest("g", LetterQuery(contains="nothing like it"), (0, 1000), 10)
    assert page == [] and 0 < before <= 900


def test_causes_are_counted_some_at_a_time_and_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_failures, "LOOKED_AT", 4)
    monkeypatch.setattr(letter_failures, "MOST_LETTERS", 9)
    held = [letter(n, "KeyError: 'a'" if n % 2 else "ValueError: no (at shop.add:1)") for n in range(12)]
    closed: set[str] = set()
    counted, reads = LetterFailures(), []

    def read(number: int) -> Iterator[Letter]:
        reads.append(number)
        return iter([x for x in held if x.number >= number])

    def look(start: int = 0) -> dict[str, Any]:
        bounds = {0: (start, 6), 1: (start, 6)}
        return counted.look("g", bounds, read, lambda x: x.id in closed)

    def open_of(shown: dict[str, Any]) -> dict[str, int]:
        return {row["type"]: row["open"] for row in shown["failures"]}

    first = look()
    assert (first["looked_at"], first["of"], open_of(first)) == (4, 12, {"ValueError": 2, "KeyError": 2})
    closed.update({"m0", "m5"})
    assert open_of(look()) == {"ValueError": 3, "KeyError": 3}
    last = look()
    assert (last["looked_at"], open_of(last), reads) == (9, {"ValueError": 4, "KeyError": 3}, [0, 4, 8])
    closed.add("m1")
    assert open_of(look()) == {"ValueError": 4, "KeyError": 2}
    assert look(start=1)["looked_at"] == 4, "after a purge it begins anew"


def test_letters_are_held_without_their_content() -> None:
    kept = letter(3, size=1_000_000).place_alone()
    assert (kept.id, kept.spot, kept.size < 1000) == ("m3", letter(3).spot, True)
    assert SimpleNamespace(headers=kept.headers).headers == [(records.ID, b"m3")]


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_list_is_bounded_in_bytes_and_in_what_it_looks_at(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """It had all that `max` allows, 10,000 letters of a megabyte; a search that found little read the whole topic, and
    nobody else could ask Kafka meanwhile."""
    monkeypatch.setattr(dead_letters, "HELD_BYTES", 20_000)
    monkeypatch.setattr(letter_search, "LOOKED_AT", 10)
    held = [letter(number, size=200 if number % 5 else 15_000) for number in range(10, 90) if number % 7]
    group, offset, numbers = letters_of(held), 0, []
    while (answer := group._listed("g", LetterQuery(), offset, most))[1] > offset:
        page, offset = answer
        numbers += [x.number for x in page]
        assert len(page) <= most and sum(x.size for x in page) < 20_000 + 16_000
    assert numbers == [x.number for x in held]
    page, offset = group._listed("g", LetterQuery(contains="nothing like it"), 0, most)
    assert (page, offset) == ([], held[9].number + 1)


class Here:
    """Calls functions at once instead of in the thread of Kafka's client, and counts them. Time passes by calls and by
    letters that are read."""

    def __init__(self) -> None:
        self.calls = 0
        self.now = self.call_seconds = self.letter_seconds = 0.0

    async def call(self, function: Callable[[], Any], seconds: float = 0.0) -> Any:
        self.calls += 1
        try:
            return function()
        finally:
            self.now += self.call_seconds


def listing(held: list[Letter]) -> tuple[Any, Here]:
    group, here = letters_of(held), Here()
    group._thread = here
    group._monotonic = lambda: here.now
    group._shown = lambda name, chosen: [x.id for x in chosen]
    return group, here


def test_a_page_of_a_list_is_empty_only_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stopped at an empty page missed the letters behind those that one call looks at."""
    monkeypatch.setattr(letter_search, "LOOKED_AT", 10)
    group, here = listing([letter(number, "found" if number == 73 else "else") for number in range(90)])
    page = asyncio.run(group.listed("g", LetterQuery(contains="found"), 0, 5))
    assert (page, here.calls) == ({"messages": ["m73"], "next_offset": 80}, 8)
    page = asyncio.run(group.listed("g", LetterQuery(contains="found"), 80, 5))
    assert (page, asyncio.run(group.listed("g", LetterQuery(contains="found"), 90, 5))) == (
        {"messages": [], "next_offset": 90},
        {"messages": [], "next_offset": 90},
    )


def test_a_search_that_takes_long_answers_and_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_search, "LOOKED_AT", 10)
    group, here = listing([letter(number, "found" if number == 13 else "else") for number in range(90)])
    here.call_seconds = SEARCH_SECONDS
    page = asyncio.run(group.listed("g", LetterQuery(contains="found"), 0, 5))
    assert page == {"messages": [], "next_offset": 10}
    page = asyncio.run(group.listed("g", LetterQuery(contains="found"), 10, 5))
    assert page["messages"] == ["m13"]


def redriving(held: list[Letter], closed: set[int]) -> tuple[Any, Here, list[int]]:
    """(the letters of a group, of which some are closed; the calls; the numbers of the letters that were read)."""
    group, here = listing(held)
    read: list[int] = []

    def letters(name: str, number: int) -> Iterator[Letter]:
        for x in held:
            if x.number >= number:
                read.append(x.number)
                here.now += here.letter_seconds
                yield x

    notes = {x.spot: x.id for x in held if x.number in closed}
    group._letters = letters
    group._redriven = SimpleNamespace(read=lambda: None, sent=lambda name: notes, dropped=lambda name: {})
    group._check_takes_again = lambda name: None
    group._done = lambda name, ids, drop: [{"id": i, "status": 204 if drop else 201} for i in ids.values()]
    return group, here, read


def carried_out(change: Any) -> Any:
    return asyncio.run(change.do())


def test_a_redrive_by_conditions_goes_on_from_request_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read all letters in one call: with many it was refused after 10 s, however often it was repeated."""
    monkeypatch.setattr(letter_search, "LOOKED_AT", 10)
    held = [letter(number, "found" if number in (3, 4, 25, 26, 27) else "else") for number in range(33)]
    group, here, read = redriving(held, closed={4})
    here.call_seconds = SEARCH_SECONDS
    chosen: list[tuple[list[str], int]] = []
    offset = 0
    while len(chosen) < 9:
        wanted = Chosen(None, LetterQuery(contains="found"), 2, offset=offset)
        change = asyncio.run(group.redrive("g", wanted))
        offset = change.preview["next_offset"]
        chosen.append((change.preview["ids"], offset))
        items = [{"id": name, "status": 201} for name in change.preview["ids"]]
        assert carried_out(change) == {"items": items, "next_offset": offset}
        if not offset:
            break
    assert chosen == [(["m3"], 10), ([], 20), (["m25", "m26"], 27), (["m27"], 0)]
    assert read == list(range(33))


@pytest.mark.parametrize("does", ["redrive", "drop"])
def test_ids_are_looked_for_from_request_to_request(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """The request that has seen the last letter refuses the ids that it did not find, and none before it does."""
    monkeypatch.setattr(letter_search, "LOOKED_AT", 10)
    group, here, read = redriving([letter(number) for number in range(25)], closed={12})
    here.call_seconds = SEARCH_SECONDS

    def answer(names: tuple[str, ...], offset: int) -> tuple[list[tuple[str, int]], int]:
        if does == "redrive":
            change = asyncio.run(group.redrive("g", Chosen(names, LetterQuery(), 100, offset=offset)))
        else:
            change = asyncio.run(group.drop("g", names, "of no use", offset))
        result = carried_out(change)
        assert change.preview["next_offset"] == result["next_offset"]
        return [(item["id"], item["status"]) for item in result["items"]], result["next_offset"]

    new = 201 if does == "redrive" else 204
    names = ("m3", "m12", "none")
    assert answer(names, 0) == ([("m3", new)], 10)
    assert answer(names, 10) == ([("m12", new)], 20)  # it is closed: the same message may have an open letter as well
    items, following = answer(names, 20)
    assert (dict(items)["none"], following) == (404, 0)
    del read[:]
    assert answer(("m2", "m5"), 1) == ([("m2", new), ("m5", new)], 0)
    assert read == [1, 2, 3, 4, 5], "all were found"


def test_a_request_goes_on_from_part_to_part_in_turns_with_others() -> None:
    """A part ends after its time as well: letters may have a megabyte each."""
    group, here, _ = redriving([letter(number) for number in range(9)], closed=set())
    here.letter_seconds = PART_SECONDS / 4
    change = asyncio.run(group.redrive("g", Chosen(None, LetterQuery(), 100)))
    assert change.preview["ids"] == [f"m{number}" for number in range(9)] and change.preview["next_offset"] == 0
    assert here.calls == 1 + 3  # the first one asks for the group
    page = asyncio.run(group.listed("g", LetterQuery(), 0, 100))
    assert page == {"messages": ["m0", "m1", "m2", "m3"], "next_offset": 4}
