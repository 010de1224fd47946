"""Dead letters of groups over Kafka for the admin routes, which show, count, redrive, drop and purge them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.admin_api.dead_letters import AT_ONCE
from notify.errors import InvalidRequest, NotFound
from notify.kafka.groups import DEAD_LETTER, dead_letter_topic, retry_topic
from notify.kafka.redriven import Spot
from notify.protocol.limits import LIMITS
from notify.protocol.wire import microseconds
from notify.server.groups import Change, Chosen, Edited
from notify.server.groups.kafka import letters, offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, gathered
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.letter_counts import LetterCounts
from notify.server.groups.kafka.letter_failures import LetterFailures
from notify.server.groups.kafka.letter_search import LetterSearch, Part
from notify.server.groups.kafka.letters import Letter
from notify.server.groups.kafka.redriven import Redriven, has
from notify.server.groups.kafka.thread import WRITE_SECONDS, BrokersThread
from notify.server.groups.own_letters import not_letters
from notify.server.jobs.dead_letters import EFFECTS_KEPT, LETTER_DROPPED
from notify.server.jobs.letter_query import LOOKED_AT, SEARCH_SECONDS, LetterQuery, RedriveSpec

LOT_BYTES = 8 << 20
FIRST_WINDOW, LARGEST_WINDOW = 500, 8_000
"""For the newest letters: the first and the largest window that is read."""
HELD_BYTES = LIMITS.reply_bytes
"""The most bytes of letters held for a page, plus one letter."""
NO_EDIT = "over Kafka a letter is sent again as it is: publish a corrected message, and drop the letter"
NO_REPLAY = (
    "over Kafka effects are not replayed: an inbox does nothing for messages that took effect before; use a group of "
    "another name, or send the messages again"
)


class KafkaLetters:
    """The letters of one cluster's groups. Every method raises Unavailable while the brokers do not answer."""

    def __init__(
        self, thread: BrokersThread, look: LatestSnapshot, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`monotonic`: a clock in seconds, which bounds searches."""
        self._monotonic = monotonic
        self._thread = thread
        self._brokers = thread.brokers
        self._look = look
        self._redriven = Redriven(thread.brokers)
        self._counts = LetterCounts(thread.brokers, self._redriven.noted)
        self._failures = LetterFailures()

    def close(self) -> None:
        self._redriven.close()
        self._counts.close()

    # --- views ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """How many open letters each group has. Call it in the thread. Raises KafkaException."""
        bounds = self._look.now().letters
        self._redriven.read()
        counts: dict[str, int] = {}
        for (topic, _), count in self._counts.look(bounds).items():
            name = topic.removeprefix(DEAD_LETTER)
            counts[name] = counts.get(name, 0) + count
        return {name: max(0, count - self._closed(name)) for name, count in counts.items()}

    def _closed(self, name: str) -> int:
        """How many of a group's letters that are still there were redriven or dropped."""
        topic, bounds = dead_letter_topic(name), self._look.last.letters_of(name)
        notes = itertools.chain(self._redriven.sent(name).items(), self._redriven.dropped(name).items())
        return sum(
            start <= spot.offset < end and self._counts.is_about(topic, spot, note)
            for spot, note in notes
            for start, end in [bounds.get(spot.partition, (0, 0))]
        )

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        counts = await self._thread.call(self.counts)
        rows = [{"group": n, "count": count} for n, count in sorted(counts.items()) if count and n.startswith(prefix)]
        return heapq.nlargest(most, rows, key=lambda row: row["count"])

    async def listed(self, name: str, wanted: LetterQuery, offset: int, most: int) -> dict[str, Any]:
        def find(offset: int) -> dict[str, Any]:
            chosen, next_offset = self._listed(name, wanted, offset, most)
            return {"messages": self._shown(name, chosen), "next_offset": next_offset}

        deadline = self._monotonic() + SEARCH_SECONDS
        while True:  # other requests get their turn between two calls
            page = await self._thread.call(partial(find, offset))
            if page["messages"] or page["next_offset"] == offset or self._monotonic() >= deadline:
                return page
            offset = page["next_offset"]

    def _listed(self, name: str, wanted: LetterQuery, offset: int, most: int) -> tuple[list[Letter], int]:
        """(the matching letters from a number on, the number for the next call).

        There may be fewer than `most` if few match, or if letters are large.
        """
        chosen: list[Letter] = []
        size = 0
        part = Part(self._letters(name, offset), offset, self._monotonic)
        for letter in part:
            if _is_wanted(wanted, letter):
                chosen.append(letter)
                size += letter.size
                if len(chosen) == most or size >= HELD_BYTES:
                    break
        return chosen, part.next

    async def newest(self, name: str, wanted: LetterQuery, before: int, most: int) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            start, end = letters.numbers(self._look.now().letters_of(name))
            chosen, next_before = self._newest(name, wanted, (start, min(end, before or end)), most)
            return {"messages": self._shown(name, chosen), "next_before": next_before}

        return await self._thread.call(find)

    def _newest(self, name: str, wanted: LetterQuery, span: tuple[int, int], most: int) -> tuple[list[Letter], int]:
        """(the newest matching letters in a span of numbers, the number for the next call; 0: there are no more).

        Kafka can only be read forwards: so windows are read, each before the last one. There may be fewer than `most`
        if few match, or if letters are large.
        """
        start, before = span
        chosen: list[Letter] = []
        room, window, first = HELD_BYTES, FIRST_WINDOW, before
        while before > start and len(chosen) < most and room > 0 and first - before < LOOKED_AT:
            low = max(start, before - window)
            reading = itertools.takewhile(partial(_is_before, before), self._letters(name, low))
            held: deque[Letter] = deque()
            size = 0
            for letter in reading:
                if _is_wanted(wanted, letter):
                    held.append(letter)
                    size += letter.size
                    while len(held) > 1 and (len(held) > most - len(chosen) or size > room):
                        low = held[0].number + 1  # the dropped letter belongs to the next page
                        size -= held.popleft().size
            chosen += reversed(held)
            room, window, before = room - size, min(4 * window, LARGEST_WINDOW), low
        return chosen, before if before > start else 0

    def _shown(self, name: str, chosen: Sequence[Letter]) -> list[dict[str, Any]]:
        self._redriven.read()
        sent, dropped = self._redriven.sent(name), self._redriven.dropped(name)
        return [x.shown(redriven=has(sent, x), dropped=has(dropped, x)) for x in chosen]

    async def failures(self, name: str) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            self._redriven.read()
            bounds = self._look.now().letters_of(name)
            return self._failures.look(name, bounds, lambda n: self._letters(name, n), self._is_closed(name))

        return await self._thread.call(find)

    def _is_closed(self, name: str) -> Callable[[Letter], bool]:
        """A function that tells whether a letter was redriven or dropped, by the notes read last."""
        sent, dropped = self._redriven.sent(name), self._redriven.dropped(name)
        return lambda letter: has(sent, letter) or has(dropped, letter)

    async def drop(self, name: str, names: tuple[str, ...], why: str, offset: int = 0) -> Change:
        ids, next_offset = await self._choose(name, Chosen(names, LetterQuery(), AT_ONCE, offset=offset))
        preview = {"ids": list(ids.values()), "next_offset": next_offset}
        return Change(preview, lambda: self._carry_out(name, ids, names, next_offset, why))

    async def edit(self, name: str, edited: Edited) -> Change:
        raise InvalidRequest(NO_EDIT)

    # --- redriving --------------------------------------------------------------------------------------------

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        if chosen.replay_effects:
            raise InvalidRequest(NO_REPLAY)

        await self._thread.call(lambda: self._check_takes_again(name))
        ids, next_offset = await self._choose(name, chosen)
        preview = {"ids": list(ids.values()), "effects": EFFECTS_KEPT, "next_offset": next_offset}
        return Change(preview, lambda: self._carry_out(name, ids, chosen.ids, next_offset))

    async def _choose(self, name: str, chosen: Chosen) -> tuple[dict[Spot, str], int]:
        """(the ids of the chosen letters by place, the number from which the next request goes on, or 0).

        A request goes on from call to call for SEARCH_SECONDS; other requests get their turn between two calls.
        """
        search = LetterSearch(chosen, self._monotonic)

        def look() -> None:
            self._redriven.read()
            search.look(partial(self._letters, name), self._is_closed(name))

        deadline = self._monotonic() + SEARCH_SECONDS
        while not search.has_ended:
            await self._thread.call(look)
            if self._monotonic() >= deadline:
                break
        return search.found, search.next_offset

    async def _carry_out(
        self, name: str, ids: Mapping[Spot, str], asked: Sequence[str] | None, next_offset: int, drop: str = ""
    ) -> dict[str, Any]:
        """Redrive or drop letters. An id without a letter is refused by the request that looked at the last one."""
        items = await self._thread.call(lambda: self._done(name, ids, drop), WRITE_SECONDS)
        missing = [] if next_offset else not_letters(name, asked, list(ids.values()))
        return {"items": items + missing, "next_offset": next_offset}

    def _done(self, name: str, ids: Mapping[Spot, str], drop: str = "") -> list[dict[str, Any]]:
        """Redrive or drop the letters of these spots and ids, lot by lot: they may not fit into memory."""
        if not ids:
            return []
        partitions = self._partitions(name)
        first = min(spot.offset for spot in ids) * partitions
        reading = letters.read(self._brokers, name, partitions, first)
        chosen = (letter for letter in reading if ids.get(letter.spot) == letter.id)
        return [item for lot in _lots(itertools.islice(chosen, len(ids))) for item in self._sent(name, lot, drop)]

    async def bounds(self, group: str) -> tuple[int, int, int]:
        def ask() -> tuple[int, int, int]:
            start, end = letters.numbers(self._look.again().letters_of(group))
            return start, end, end - start

        return await self._thread.call(ask)

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        if spec.replay_effects:
            raise InvalidRequest(NO_REPLAY)

        def send() -> tuple[list[dict[str, Any]], int] | None:
            reading = itertools.takewhile(lambda letter: letter.number < spec.until, self._letters(spec.group, offset))
            batch = next(_lots(itertools.islice(reading, most)), None)
            if batch is None:
                return None
            items = self._sent(spec.group, [x for x in batch if _is_wanted(spec.wanted, x)], spec.drop)
            # A job concerns open letters: dropped letters are left out of its results.
            return [item for item in items if item.get("code") != LETTER_DROPPED], batch[-1].number + 1

        return await self._thread.call(send, WRITE_SECONDS)

    def _check_takes_again(self, group: str) -> None:
        """Raises InvalidRequest if a group has dead letters but no retry topic."""
        topics = self._look.now().topics
        if dead_letter_topic(group) in topics and retry_topic(group) not in topics:
            raise InvalidRequest(
                f"group {group[:100]!r} has no retry topic: letters of a broadcast are sent again with publish",
                "broadcast",
            )

    def _sent(self, group: str, chosen: Sequence[Letter], drop: str = "") -> list[dict[str, Any]]:
        """Redrive letters, or drop them if `drop` says who drops them, and why; the result of each."""
        if not chosen:
            return []
        statuses = self._redriven.drop(group, chosen, drop) if drop else self._redriven.send(group, chosen)
        items: list[dict[str, Any]] = []
        for letter, status in zip(chosen, statuses, strict=True):
            why = {"code": LETTER_DROPPED, "detail": "it was dropped: it is not sent again"} if status == 410 else {}
            items.append({"id": letter.id, "status": status} | why)
        return items

    def _letters(self, name: str, number: int) -> Iterator[Letter]:
        return letters.read(self._brokers, name, self._partitions(name), number)

    def _partitions(self, name: str) -> int:
        """The number of partitions of a group's dead letters. Raises NotFound if it has none."""
        topic = dead_letter_topic(name)
        partitions = self._look.now().topics.get(topic) or self._look.again().topics.get(topic)
        if partitions is None:
            raise NotFound(f"Kafka has no dead letters of a group {name[:100]!r}")
        return partitions

    # --- purging ----------------------------------------------------------------------------------------------

    async def purge(self, name: str, before: str | int) -> Change:
        rows = await self._thread.call(lambda: self._purged(name, before))
        preview = {"queues": rows, "missed": {}}

        def do() -> Any:
            self._delete(dead_letter_topic(name), rows)
            self._look.again()
            return preview

        return Change(preview, lambda: self._thread.call(do, WRITE_SECONDS))

    def _purged(self, name: str, before: str | int) -> list[dict[str, int]]:
        """Each partition's first offset before and after a purge. Raises InvalidRequest, NotFound."""
        partitions, bounds = self._partitions(name), self._look.again().letters_of(name)
        if isinstance(before, int) and partitions > 1:
            raise InvalidRequest(f"the dead letters of {name[:100]!r} are in {partitions} partitions: give an instant")
        to = {p: end for p, (_, end) in bounds.items()}
        if isinstance(before, int):
            to = {p: min(max(before, start), end) for p, (start, end) in bounds.items()}
        elif before != "latest":
            places = [(dead_letter_topic(name), p) for p in bounds]
            at_time = offsets.at_time(self._brokers.admin, places, _instant(before))
            to |= {p: offset for (_, p), offset in at_time.items() if offset >= 0}
        return [
            {"queue": p, "from": start, "to": to[p], "dropped": to[p] - start}
            for p, (start, _) in sorted(bounds.items())
        ]

    def _delete(self, topic: str, rows: Sequence[Mapping[str, int]]) -> None:
        asked = [TopicPartition(topic, row["queue"], row["to"]) for row in rows if row["dropped"]]
        if not asked:
            return
        deleted = self._brokers.admin.delete_records(asked, request_timeout=CALL_SECONDS)
        for answer in gathered(deleted).values():
            if isinstance(answer, KafkaError):
                raise KafkaException(answer)


def _lots(letters: Iterable[Letter]) -> Iterator[list[Letter]]:
    """Lots of letters, each for one transaction: at most LOT_BYTES, plus one letter."""
    lot: list[Letter] = []
    room = LOT_BYTES
    for letter in letters:
        lot.append(letter)
        room -= letter.size
        if room <= 0:
            yield lot
            lot, room = [], LOT_BYTES
    if lot:
        yield lot


def _is_before(number: int, letter: Letter) -> bool:
    return letter.number < number


def _is_wanted(wanted: LetterQuery, letter: Letter) -> bool:
    return wanted.fits(letter.payload(), letter.dead_us)


def _instant(text: str) -> int:
    """Microseconds since 1970. Raises InvalidRequest."""
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError as error:
        raise InvalidRequest(f"before is latest, an offset or an instant, not {text[:40]!r} ({error})") from None
