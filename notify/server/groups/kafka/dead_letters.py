"""Dead letters of groups over Kafka, as the admin routes show, count, send again and purge them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from notify.errors import InvalidRequest, NotFound
from notify.kafka.groups import DEAD_LETTER, dead_letter_topic, retry_topic
from notify.kafka.redriven import Spot
from notify.message import DEAD_LETTER_REASON
from notify.server.groups import Change, Chosen, Edited
from notify.server.groups.kafka import letters, offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, gathered
from notify.server.groups.kafka.letter_counts import LetterCounts
from notify.server.groups.kafka.letters import Letter
from notify.server.groups.kafka.look import Look
from notify.server.groups.kafka.redriven import Redriven, is_sent
from notify.server.groups.kafka.thread import WRITE_SECONDS, BrokersThread
from notify.server.groups.own_letters import failure_row, not_letters
from notify.server.jobs.failures import Failures
from notify.server.jobs.redrive import AT_ONCE, EFFECTS_KEPT, RedriveSpec, Wanted
from notify.wire import microseconds

LOT_BYTES = 8 << 20
LOOKED_AT = 500
"""Letters that a list of failure groups is made of, the oldest first: each has to be read."""
NO_DROP = "over Kafka chosen letters cannot be dropped: send them again, or purge all up to a point"
NO_NEWEST = "over Kafka dead letters are listed with the oldest first: give an offset to go on from"
NO_EDIT = "over Kafka a letter is sent again as it is: publish a corrected message, and leave the letter"
NO_REPLAY = (
    "over Kafka effects are not replayed: an inbox does nothing for messages that took effect before; use a group of "
    "another name, or send the messages again"
)


class KafkaLetters:
    """The letters of one cluster's groups. Every method raises Unavailable while the brokers do not answer."""

    def __init__(self, thread: BrokersThread, look: Look) -> None:
        self._thread = thread
        self._brokers = thread.brokers
        self._look = look
        self._redriven = Redriven(thread.brokers)
        self._counts = LetterCounts(thread.brokers)

    def close(self) -> None:
        self._redriven.close()
        self._counts.close()

    # --- views ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """How many letters each group has that were not sent again. In the thread; raises KafkaException."""
        bounds = self._look.now().letters
        counts: dict[str, int] = {}
        for (topic, _), count in self._counts.look(bounds).items():
            name = topic.removeprefix(DEAD_LETTER)
            counts[name] = counts.get(name, 0) + count
        for name, sent in self._redriven.read().items():
            if name in counts:
                starts = {p: start for p, (start, _) in self._look.last.letters_of(name).items()}
                there = sum(offset >= starts.get(partition, offset + 1) for partition, offset in sent)
                counts[name] = max(0, counts[name] - there)
        return counts

    async def counted(self, prefix: str, most: int) -> list[dict[str, Any]]:
        counts = await self._thread.call(self.counts)
        rows = [{"group": n, "count": count} for n, count in sorted(counts.items()) if count and n.startswith(prefix)]
        return heapq.nlargest(most, rows, key=lambda row: row["count"])

    async def listed(self, name: str, wanted: Wanted, offset: int, most: int) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            chosen = list(itertools.islice((x for x in self._letters(name, offset) if _is_wanted(wanted, x)), most))
            sent = self._redriven.of_group(name)
            shown = [letter.shown(redriven=is_sent(letter, sent)) for letter in chosen]
            return {"messages": shown, "next_offset": chosen[-1].number + 1 if chosen else offset}

        return await self._thread.call(find)

    async def newest(self, name: str, wanted: Wanted, before: int, most: int) -> dict[str, Any]:
        raise InvalidRequest(NO_NEWEST)

    async def failures(self, name: str) -> dict[str, Any]:
        def find() -> dict[str, Any]:
            failures, sent, looked_at = Failures(), self._redriven.of_group(name), 0
            for letter in itertools.islice(self._letters(name, 0), LOOKED_AT):
                payload, looked_at = letter.payload(), looked_at + 1
                reason = (payload.headers or {}).get(DEAD_LETTER_REASON, "")
                is_closed = is_sent(letter, sent)
                failures.note(reason, letter.id, payload.topic, letter.dead_us, is_closed=is_closed, may_grow=True)
            of = sum(max(0, end - start) for start, end in self._look.now().letters_of(name).values())
            rows = [failure_row(failure) for failure in failures.listed()]
            return {"failures": rows, "others": failures.others, "looked_at": looked_at, "of": max(of, looked_at)}

        return await self._thread.call(find)

    async def drop(self, name: str, names: tuple[str, ...], why: str) -> Change:
        raise InvalidRequest(NO_DROP)

    async def edit(self, name: str, edited: Edited) -> Change:
        raise InvalidRequest(NO_EDIT)

    # --- sending again ----------------------------------------------------------------------------------------

    async def redrive(self, name: str, chosen: Chosen) -> Change:
        if chosen.replay_effects:
            raise InvalidRequest(NO_REPLAY)

        def choose() -> dict[Spot, str]:
            self._check_takes_again(name)
            return {letter.spot: letter.id for letter in self._chosen(name, chosen)}

        ids = await self._thread.call(choose)
        names = list(ids.values())

        def do() -> Any:
            sent = self._sent_again(name, ids) if ids else []
            return {"items": sent + not_letters(name, chosen.ids, names)}

        return Change({"ids": names, "effects": EFFECTS_KEPT}, lambda: self._thread.call(do, WRITE_SECONDS))

    def _sent_again(self, name: str, ids: Mapping[Spot, str]) -> list[dict[str, Any]]:
        """Send the letters of these spots and ids. They are read for it: together they may be larger than memory."""
        partitions = self._partitions(name)
        first = min(spot.offset for spot in ids) * partitions
        reading = letters.read(self._brokers, name, partitions, first)
        there = (letter for letter in reading if ids.get(letter.spot) == letter.id)
        return [item for lot in _lots(itertools.islice(there, len(ids))) for item in self._sent(name, lot)]

    async def bounds(self, group: str) -> tuple[int, int, int]:
        def ask() -> tuple[int, int, int]:
            self._check_takes_again(group)
            start, end = letters.numbers(self._look.again().letters_of(group))
            return start, end, end - start

        return await self._thread.call(ask)

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        if spec.replay_effects or spec.drop:
            raise InvalidRequest(NO_DROP if spec.drop else NO_REPLAY)

        def send() -> tuple[list[dict[str, Any]], int] | None:
            reading = itertools.takewhile(lambda letter: letter.number < spec.until, self._letters(spec.group, offset))
            batch = next(_lots(itertools.islice(reading, most)), None)
            if batch is None:
                return None
            return self._sent(spec.group, [x for x in batch if _is_wanted(spec.wanted, x)]), batch[-1].number + 1

        return await self._thread.call(send, WRITE_SECONDS)

    def _check_takes_again(self, group: str) -> None:
        """Raises InvalidRequest, NotFound."""
        topics = self._look.now().topics
        if dead_letter_topic(group) in topics and retry_topic(group) not in topics:
            raise InvalidRequest(
                f"group {group[:100]!r} has no retry topic: letters of a broadcast are sent again with publish",
                "broadcast",
            )

    def _chosen(self, name: str, chosen: Chosen) -> Iterator[Letter]:
        if chosen.ids is not None:
            asked = set(chosen.ids)
            return (letter for letter in self._letters(name, 0) if letter.id in asked)
        sent = self._redriven.of_group(name)
        fitting = (x for x in self._letters(name, 0) if not is_sent(x, sent) and _is_wanted(chosen.wanted, x))
        return itertools.islice(fitting, min(chosen.most, AT_ONCE))

    def _sent(self, group: str, chosen: Sequence[Letter]) -> list[dict[str, Any]]:
        statuses = self._redriven.send(group, chosen) if chosen else []
        return [{"id": letter.id, "status": status} for letter, status in zip(chosen, statuses, strict=True)]

    def _letters(self, name: str, number: int) -> Iterator[Letter]:
        return letters.read(self._brokers, name, self._partitions(name), number)

    def _partitions(self, name: str) -> int:
        """Raises NotFound for a group without dead letters."""
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
        """Each partition's first offset before and after. Raises InvalidRequest, NotFound."""
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
    """Letters that are sent in one transaction each: of LOT_BYTES at most, and one letter more."""
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


def _is_wanted(wanted: Wanted, letter: Letter) -> bool:
    return wanted.fits(letter.payload(), letter.dead_us)


def _instant(text: str) -> int:
    """Microseconds since 1970. Raises InvalidRequest."""
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError as error:
        raise InvalidRequest(f"before is latest, an offset or an instant, not {text[:40]!r} ({error})") from None
