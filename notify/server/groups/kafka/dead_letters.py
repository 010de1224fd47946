"""The dead letters of groups over Kafka: the engine of `letters` over their dead-letter topics and notes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from math import inf
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.errors import InvalidRequest, NotFound
from notify.kafka.groups import DEAD_LETTER, dead_letter_topic, retry_topic
from notify.protocol.wire import microseconds
from notify.server.groups.kafka import letters, offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, gathered
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.letter_counts import OffsetCounts
from notify.server.groups.kafka.letters import KafkaLetter
from notify.server.groups.kafka.redriven import Redriven, has
from notify.server.groups.kafka.thread import WRITE_SECONDS, BrokersThread
from notify.server.letters.engine import LOT_BYTES, WAS_DROPPED, Bounds, Change, Closing, Fate, Look, Part, look_at
from notify.server.letters.failures import LetterCounts

PART_LETTERS = 20_000
"""The most letters that one call looks at."""
PART_SECONDS = 2.0
"""How long one call reads letters, plus one call of Kafka's client."""
FIRST_WINDOW, LARGEST_WINDOW = 500, 8_000
"""For the newest letters: the first and the largest window that is read."""
NO_REPLAY = (
    "over Kafka effects are not replayed: an inbox does nothing for messages that took effect before; use a group of "
    "another name, or send the messages again"
)


class KafkaLetters:
    """The letters of one cluster's groups. Every method raises Unavailable while the brokers do not answer."""

    most_looked_at = inf
    closes_alone = False
    rewrite = None

    def __init__(
        self, thread: BrokersThread, look: LatestSnapshot, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`monotonic`: a clock in seconds, which bounds one call's reading."""
        self._monotonic = monotonic
        self._thread = thread
        self._brokers = thread.brokers
        self._look = look
        self._redriven = Redriven(thread.brokers)
        self._offset_counts = OffsetCounts(thread.brokers, self._redriven.noted)
        self.counts = LetterCounts(self)

    def close_clients(self) -> None:
        self._redriven.close()
        self._offset_counts.close()

    # --- counting ---------------------------------------------------------------------------------------------

    def open_letters(self) -> dict[str, int]:
        """How many open letters each group has. Call it in the thread. Raises KafkaException."""
        bounds = self._look.now().letters
        self._redriven.read()
        counts: dict[str, int] = {}
        for (topic, _), count in self._offset_counts.look(bounds).items():
            group = topic.removeprefix(DEAD_LETTER)
            counts[group] = counts.get(group, 0) + count
        return {group: max(0, count - self._closed(group)) for group, count in counts.items()}

    def _closed(self, group: str) -> int:
        """How many of a group's letters that are still there were redriven or dropped."""
        topic, bounds = dead_letter_topic(group), self._look.last.letters_of(group)
        notes = itertools.chain(self._redriven.sent(group).items(), self._redriven.dropped(group).items())
        return sum(
            start <= spot.offset < end and self._offset_counts.is_about(topic, spot, note)
            for spot, note in notes
            for start, end in [bounds.get(spot.partition, (0, 0))]
        )

    async def counted(self, prefix: str) -> list[dict[str, Any]]:
        counts = await self._thread.call(self.open_letters)
        return [{"group": g, "count": count} for g, count in sorted(counts.items()) if count and g.startswith(prefix)]

    async def bounds(self, group: str, *, fresh: bool = False) -> Bounds:
        def ask() -> Bounds:
            bounds = (self._look.again() if fresh else self._look.now()).letters_of(group)
            since = {partition: start for partition, (start, _) in bounds.items()}
            return Bounds(*letters.numbers(bounds), sum(max(0, end - start) for start, end in bounds.values()), since)

        return await self._thread.call(ask)

    # --- reading ----------------------------------------------------------------------------------------------

    async def read(self, group: str, number: int, look: Look) -> Part[KafkaLetter]:
        def read() -> Part[KafkaLetter]:
            deadline = self._monotonic() + PART_SECONDS
            return look_at(
                self._letters(group, number), number, look, PART_LETTERS, is_late=lambda: self._monotonic() >= deadline
            )

        return await self._thread.call(read)

    async def read_back(self, group: str, before: int, look: Look) -> Part[KafkaLetter]:
        """Kafka can only be read forwards: so windows are read, each before the last one."""

        def read() -> Part[KafkaLetter]:
            start, end = letters.numbers(self._look.now().letters_of(group))
            return self._window(group, start, min(end, before or end), look)

        return await self._thread.call(read)

    def _window(self, group: str, start: int, before: int, look: Look) -> Part[KafkaLetter]:
        """The newest letters of a window that ends before a number; the window is larger the longer the search is."""
        low = max(start, before - min(max(FIRST_WINDOW, 3 * look.looked_at), LARGEST_WINDOW))
        held: deque[KafkaLetter] = deque()
        size = looked_at = 0
        if low < before:
            for letter in itertools.takewhile(lambda letter: letter.number < before, self._letters(group, low)):
                looked_at += 1
                if look.takes(letter):
                    held.append(letter)
                    size += letter.size
                    while len(held) > 1 and (len(held) > look.most or size > look.room):
                        low = held[0].number + 1  # the dropped letter belongs to the next part
                        size -= held.popleft().size
        return Part(list(reversed(held)), low, looked_at, low <= start)

    async def fates(self, group: str, letters: Sequence[KafkaLetter]) -> list[Fate]:
        if not letters:
            return []

        def look() -> list[Fate]:
            self._redriven.read()
            sent, dropped = self._redriven.sent(group), self._redriven.dropped(group)
            return [Fate.REDRIVEN if has(sent, x) else Fate.DROPPED if has(dropped, x) else Fate.OPEN for x in letters]

        return await self._thread.call(look)

    async def indexed(self, group: str, ids: Collection[str]) -> None:
        return None

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()  # the thread gives others their turn between two calls

    def _letters(self, group: str, number: int) -> Iterator[KafkaLetter]:
        return letters.read(self._brokers, group, self._partitions(group), number)

    def _partitions(self, group: str) -> int:
        """The number of partitions of a group's dead letters. Raises NotFound if it has none."""
        topic = dead_letter_topic(group)
        partitions = self._look.now().topics.get(topic) or self._look.again().topics.get(topic)
        if partitions is None:
            raise NotFound(f"Kafka has no dead letters of a group {group[:100]!r}")
        return partitions

    # --- closing ----------------------------------------------------------------------------------------------

    async def check(self, group: str, how: Closing) -> None:
        if how.replay_effects:
            raise InvalidRequest(NO_REPLAY)
        await self._thread.call(lambda: self._check_takes_again(group))

    def _check_takes_again(self, group: str) -> None:
        """Raises InvalidRequest if a group has dead letters but no retry topic."""
        topics = self._look.now().topics
        if dead_letter_topic(group) in topics and retry_topic(group) not in topics:
            raise InvalidRequest(
                f"group {group[:100]!r} has no retry topic: publish the dead letters of a broadcast again",
                "broadcast",
            )

    async def lot(self, group: str, letters: Sequence[KafkaLetter]) -> tuple[list[KafkaLetter], Sequence[KafkaLetter]]:
        return await self._thread.call(partial(self._lot, group, letters), WRITE_SECONDS)

    def _lot(self, group: str, named: Sequence[KafkaLetter]) -> tuple[list[KafkaLetter], Sequence[KafkaLetter]]:
        wanted = {letter.spot: letter for letter in named}
        lot: list[KafkaLetter] = []
        size = 0
        first = min(spot.offset for spot in wanted) * self._partitions(group)
        for letter in self._letters(group, first):
            named_here = wanted.get(letter.spot)
            if named_here is not None and named_here.id == letter.id:
                del wanted[letter.spot]
                lot.append(letter)
                size += letter.size
            if not wanted or size >= LOT_BYTES:
                return lot, list(wanted.values())
        return lot, []  # those that are left are gone

    async def close(self, group: str, letters: Sequence[KafkaLetter], how: Closing) -> list[dict[str, Any]]:
        if how.replay_effects:
            raise InvalidRequest(NO_REPLAY)
        if not letters:
            return []
        close = partial(self._redriven.drop, why=how.drop) if how.drop else self._redriven.send
        statuses = await self._thread.call(lambda: close(group, letters), WRITE_SECONDS)
        return [
            {"id": letter.id} | (dict(WAS_DROPPED) if status == 410 else {"status": status})
            for letter, status in zip(letters, statuses, strict=True)
        ]

    # --- purging ----------------------------------------------------------------------------------------------

    async def purge(self, group: str, before: str | int) -> Change:
        rows = await self._thread.call(lambda: self._purged(group, before))
        preview = {"queues": rows, "missed": {}}

        def do() -> Any:
            self._delete(dead_letter_topic(group), rows)
            self._look.again()
            return preview

        return Change(preview, lambda: self._thread.call(do, WRITE_SECONDS))

    def _purged(self, group: str, before: str | int) -> list[dict[str, int]]:
        """Each partition's first offset before and after a purge. Raises InvalidRequest, NotFound."""
        partitions, bounds = self._partitions(group), self._look.again().letters_of(group)
        if isinstance(before, int) and partitions > 1:
            raise InvalidRequest(f"the dead letters of {group[:100]!r} are in {partitions} partitions: give an instant")
        to = {p: end for p, (_, end) in bounds.items()}
        if isinstance(before, int):
            to = {p: min(max(before, start), end) for p, (start, end) in bounds.items()}
        elif before != "latest":
            places = [(dead_letter_topic(group), p) for p in bounds]
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


def _instant(text: str) -> int:
    """Microseconds since 1970. Raises InvalidRequest."""
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError as error:
        raise InvalidRequest(f"before is latest, an offset or an instant, not {text[:40]!r} ({error})") from None
