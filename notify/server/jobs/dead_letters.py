"""Dead letters of a group: searching them, sending them to the group again, dropping them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from notify.protocol import ids
from notify.protocol.message import FIRST_ID
from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.server.core.core import Core
from notify.server.jobs.letter_query import LOOKED_AT_ONCE
from notify.server.jobs.sending_again import send_to_group
from notify.server.message_pages import backwards
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id, redriven_id_without_topic, retry_topic
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage, Transaction
from notify.storage.topics import Topic

"""How many letters a redrive sends if it names neither ids nor `max`."""
READ_BYTES = 8 << 20
SEARCH_SHARE = 0.15
"""The share of the server's time that all searches together may use."""


LETTER_DROPPED = "dropped"
"""The code of a letter that is not sent again because it was dropped."""
DROPPED_WHY = "notify-dropped"
"""The header with who dropped a letter, and why, in the note that records the drop."""
EFFECTS_KEPT = "handlers with an inbox do nothing for messages that took effect before; those without run again"
EFFECTS_AGAIN = "handlers with an inbox take effect again, also for messages that took effect before"


class Place(NamedTuple):
    """Where a dead letter is, without its content."""

    offset: int
    id: str
    """The message's id."""


class Fate(Enum):
    """The state of a dead letter."""

    OPEN = auto()
    REDRIVEN = auto()
    DROPPED = auto()


class DeadLetters:
    """The dead letters of one group."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self.group = group
        self.topic = dead_letter_topic(group)

    def bounds(self) -> tuple[int, int, int]:
        """The first offset, the offset after the last, and the most letters that may be between them."""
        queues = self._core.queues
        if not queues.has_topic(self.topic):
            return 0, 0, 0
        start, end = queues.bounds(self.topic, 0)
        return start, end, queues.count(self.topic, 0, start, end)

    def read(self, offset: int, limit: int) -> list[StoredMessage]:
        if not self._core.queues.has_topic(self.topic):
            return []
        return self._core.queues.read(self.topic, 0, offset, limit, READ_BYTES)

    def forwards(self, offset: int, at_once: int) -> Iterator[StoredMessage]:
        """The letters from an offset on, read `at_once` at a time."""
        while batch := self.read(offset, at_once):
            yield from batch
            offset = batch[-1].offset + 1

    def backwards(self, before: int) -> Iterator[StoredMessage]:
        """The letters before an offset (0: all letters), the newest first, without damaged ones."""
        start, end, _ = self.bounds()
        if end > start:
            yield from backwards(self._core.queues, self.topic, 0, min(end, before or end))

    @contextlib.asynccontextmanager
    async def part_of_a_search(self) -> AsyncIterator[None]:
        """Wait for other searches before, and pause afterwards, which leaves most of the time to other work."""
        async with self._core.one_search:
            began = time.perf_counter()
            yield
            await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))

    async def fates(self, letters: Sequence[StoredMessage]) -> list[Fate]:
        """The state of each letter."""
        again = await self._ids_again(letters)
        states = await self._core.queues.states(again)
        return [
            Fate.OPEN if state is None else Fate.REDRIVEN if self._dropped(new_id) is None else Fate.DROPPED
            for new_id, state in zip(again, states, strict=True)
        ]

    async def are_closed(self, letters: Sequence[StoredMessage]) -> list[bool]:
        """For each letter, whether it was sent again or dropped."""
        states = await self._core.queues.states(await self._ids_again(letters))
        return [state is not None for state in states]

    async def _ids_again(self, letters: Sequence[StoredMessage]) -> list[bytes]:
        """For each letter, the transaction id under which it was or would be sent again."""
        new_ids = [redriven_id(m.topic, m.transaction_id, m.offset) for m in letters]
        states = await self._core.queues.states(new_ids)
        return [
            new_id if state is not None else self._older_id_again(m) or new_id
            for m, new_id, state in zip(letters, new_ids, states, strict=True)
        ]

    async def sent_again(self, letter: StoredMessage) -> Transaction | None:
        """The transaction in which a letter was sent again or dropped; None if it was neither."""
        (new_id,) = await self._ids_again([letter])
        return await self._core.queues.transaction(new_id)

    def _older_id_again(self, letter: StoredMessage) -> bytes | None:
        """The id under which an earlier version of Notify sent a letter again, if the sent message is still stored.

        Letters of two groups could get the same id in that version, so that the message's topic is compared, too.
        """
        old_id = redriven_id_without_topic(letter.transaction_id, letter.offset)
        topic = retry_topic(self.group, decode_payload(letter.payload).topic)
        return old_id if any(sent.topic == topic for sent in self._core.queues.messages(old_id)) else None

    async def places_of(self, message_ids: set[str]) -> list[Place]:
        """The places of the letters with these message ids, found through the index of ids."""
        places: list[Place] = []
        names = sorted(message_ids)
        for first in range(0, len(names), LOOKED_AT_ONCE):
            async with self.part_of_a_search():
                for name in names[first : first + LOOKED_AT_ONCE]:
                    places += self._places_of(name)
        return places

    def _places_of(self, message_id: str) -> list[Place]:
        try:
            transaction_id, number = ids.parse_message_id(message_id)
        except ValueError:
            return []
        return [
            place_of(m)
            for m in self._core.queues.messages(transaction_id)
            if m.topic == self.topic and m.message_no == number and not m.corrupt
        ]

    def lots(self, places: Sequence[Place]) -> Iterator[list[StoredMessage]]:
        """The letters at these places in lots of LOOKED_AT_ONCE, or READ_BYTES plus one letter: all of them may not fit
        into memory, and would hold up other work.

        Letters that are gone by now, as after a purge, are left out.
        """
        lot: list[StoredMessage] = []
        size = 0
        for place in places:
            for letter in self.read(place.offset, 1):
                if letter.offset == place.offset and not letter.corrupt:
                    lot.append(letter)
                    size += len(letter.payload)
            if size >= READ_BYTES or len(lot) >= LOOKED_AT_ONCE:
                yield lot
                lot, size = [], 0
        if lot:
            yield lot

    async def send_again(
        self, letters: Sequence[StoredMessage], *, replay_effects: bool = False, force: bool = False
    ) -> list[dict[str, Any]]:
        """Send letters to the group again; the result for each letter, in order.

        The new id is derived from the letter's place, so that repeating this changes nothing. A message belongs to the
        replay in which its letter died, or with `replay_effects` to a new replay.
        """
        to_send = list(zip(letters, await self._ids_again(letters), strict=True))
        items = await send_to_group(self._core, self.group, to_send, replay_effects=replay_effects, force=force)
        for (_, new_id), item in zip(to_send, items, strict=True):
            if item["status"] == 200 and self._dropped(new_id) is not None:
                item |= {"status": 410, "code": LETTER_DROPPED, "detail": "it was dropped: it is not sent again"}
        id_fields = [
            {"id": ids.message_id(m.transaction_id, m.message_no), "as": ids.message_id(new_id, 0)}
            for m, new_id in to_send
        ]
        return [fields | item for fields, item in zip(id_fields, items, strict=True)]

    async def drop(self, letters: Sequence[StoredMessage], why: str) -> list[dict[str, Any]]:
        """Drop letters; the result for each letter, in order: 204, or 200 if it was sent again or dropped before.

        A note with `why` is stored under the id under which the letter would be sent again.
        """
        if not letters:
            return []
        topic = dropped_topic(self.group)
        if not self._core.queues.has_topic(topic):
            self._core.topics.put_soon(Topic(topic))
        letter_ids = [ids.message_id(m.transaction_id, m.message_no) for m in letters]
        notes = [
            encode_msgpack(Payload(topic, b"", headers={FIRST_ID: letter_id, DROPPED_WHY: why[:500]}))
            for letter_id in letter_ids
        ]
        transactions = [
            NewTransaction(new_id, "", [NewMessage(topic, note)], committed=True)
            for new_id, note in zip(await self._ids_again(letters), notes, strict=True)
        ]
        results = await self._core.queues.put(transactions, self._core.clock())
        statuses = [204 if result.put is Put.STORED else 200 for result in results]
        return [{"id": letter_id, "status": status} for letter_id, status in zip(letter_ids, statuses, strict=True)]

    async def dropped(self, letters: Sequence[StoredMessage]) -> list[str | None]:
        """For each letter, who dropped it, and why; None if nobody dropped it."""
        return [self._dropped(new_id) for new_id in await self._ids_again(letters)]

    def _dropped(self, new_id: bytes) -> str | None:
        topic = dropped_topic(self.group)
        for message in self._core.queues.messages(new_id):
            if message.topic == topic and not message.corrupt:
                return (decode_payload(message.payload).headers or {}).get(DROPPED_WHY, "")
        return None


def place_of(letter: StoredMessage) -> Place:
    """A letter's place."""
    return Place(letter.offset, ids.message_id(letter.transaction_id, letter.message_no))
