"""Dead letters of a group: searching them, sending them to the group again, dropping them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from notify import ids
from notify.limits import LIMITS
from notify.message import FIRST_ID
from notify.server.core.core import Core
from notify.server.jobs.sending_again import send_to_group
from notify.server.jobs.wanted import Wanted
from notify.server.newest import backwards
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id, redriven_id_without_topic, retry_topic
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage, Transaction
from notify.storage.topics import Topic
from notify.wire import Payload, decode_payload, encode_msgpack

AT_ONCE = 4096
REDRIVEN = 100
"""How many a redrive sends that names neither ids nor `max`."""
READ_BYTES = 8 << 20
SEARCH_SHARE = 0.15
"""All searches together may use so much of the server's time."""


LETTER_DROPPED = "dropped"
"""The code of a letter that is not sent again because it was dropped."""
DROPPED_WHY = "notify-dropped"
"""The header of a note of a dropped letter that says who dropped it, and why."""
EFFECTS_KEPT = "handlers with an inbox do nothing for messages that took effect before; those without run again"
EFFECTS_AGAIN = "handlers with an inbox take effect again, also for messages that took effect before"


class DeadLetters:
    """The dead letters of one group."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self.group = group
        self.topic = dead_letter_topic(group)

    def bounds(self) -> tuple[int, int, int]:
        """First offset, the one behind the last, and how many letters there are at most between them."""
        queues = self._core.queues
        if not queues.has_topic(self.topic):
            return 0, 0, 0
        start, end = queues.bounds(self.topic, 0)
        return start, end, queues.count(self.topic, 0, start, end)

    def read(self, offset: int, limit: int) -> list[StoredMessage]:
        if not self._core.queues.has_topic(self.topic):
            return []
        return self._core.queues.read(self.topic, 0, offset, limit, READ_BYTES)

    async def find(
        self, wanted: Wanted, offset: int, limit: int, *, not_redriven: bool = False, most_bytes: int | None = None
    ) -> tuple[list[StoredMessage], int]:
        """Those that match from an offset on, and the offset to go on from: a few more than `most_bytes`, if given."""
        found: list[StoredMessage] = []
        size = 0
        while len(found) < limit and (most_bytes is None or size < most_bytes):
            async with self._core.one_search:
                began, known = time.perf_counter(), len(found)
                offset, more = await self._look(wanted, offset, limit - known, not_redriven, found)
                size += sum([len(m.payload) for m in found[known:]])
                # Others have their turn, and most of the time.
                await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))
            if not more:
                break
        return found, offset

    async def find_newest(self, wanted: Wanted, before: int, limit: int) -> tuple[list[StoredMessage], int]:
        """Those that match and lie before an offset (0: all), the newest first, and the offset to go on before: as many
        as go into a reply. The offset is 0 where there are no more.
        """
        start, end, _ = self.bounds()
        found: list[StoredMessage] = []
        size = 0
        letters = backwards(self._core.queues, self.topic, 0, min(end, before or end)) if end > start else iter(())
        while True:
            async with self._core.one_search:
                began = time.perf_counter()
                batch = list(itertools.islice(letters, wanted.at_once))
                for m in batch:
                    if wanted.matches(m):
                        found.append(m)
                        size += len(m.payload)
                        if len(found) == limit or size >= LIMITS.reply_bytes:
                            return found, m.offset if m.offset > start else 0
                if not batch:
                    return found, 0
                # Others have their turn, and most of the time.
                await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))

    async def _look(
        self, wanted: Wanted, offset: int, limit: int, not_redriven: bool, found: list[StoredMessage]
    ) -> tuple[int, bool]:
        """Add those of the next few that match, at most `limit`; the offset behind them, and whether there were any."""
        batch, most = self.read(offset, wanted.at_once), len(found) + limit
        for m in batch:
            offset = m.offset + 1
            if wanted.matches(m) and not (not_redriven and (await self.are_closed([m]))[0]):
                found.append(m)
                if len(found) == most:
                    break
        return offset, bool(batch)

    async def are_closed(self, letters: Sequence[StoredMessage]) -> list[bool]:
        """Whether each was sent again or dropped."""
        states = await self._core.queues.states(await self._ids_again(letters))
        return [state is not None for state in states]

    async def _ids_again(self, letters: Sequence[StoredMessage]) -> list[bytes]:
        """The transaction id under which each is, or was, sent again."""
        new = [redriven_id(m.topic, m.transaction_id, m.offset) for m in letters]
        states = await self._core.queues.states(new)
        return [
            again if state is not None else self._older_id_again(m) or again
            for m, again, state in zip(letters, new, states, strict=True)
        ]

    async def sent_again(self, letter: StoredMessage) -> Transaction | None:
        """The transaction in which a letter was sent again or dropped; None where it was neither."""
        (again,) = await self._ids_again([letter])
        return await self._core.queues.transaction(again)

    def _older_id_again(self, m: StoredMessage) -> bytes | None:
        """The id under which an earlier version sent a letter again, if its message is still there.

        That id was the same for letters of two groups, so that the message's topic says whose it was.
        """
        again = redriven_id_without_topic(m.transaction_id, m.offset)
        topic = retry_topic(self.group, decode_payload(m.payload).topic)
        return again if any(sent.topic == topic for sent in self._core.queues.messages(again)) else None

    def by_ids(self, names: set[str]) -> list[StoredMessage]:
        """Those of these message ids: by the id's index, not by reading all."""
        found = []
        for name in sorted(names):
            try:
                transaction_id, number = ids.parse_message_id(name)
            except ValueError:
                continue
            found += [
                m
                for m in self._core.queues.messages(transaction_id)
                if m.topic == self.topic and m.message_no == number and not m.corrupt
            ]
        return found

    async def send_again(
        self, letters: Sequence[StoredMessage], *, replay_effects: bool = False, force: bool = False
    ) -> list[dict[str, Any]]:
        """The result for each letter, in order. The new id follows from the letter's place: repeating changes nothing.

        Each belongs to the replay in which it died, or with `replay_effects` to one of its own.
        """
        again = list(zip(letters, await self._ids_again(letters), strict=True))
        items = await send_to_group(self._core, self.group, again, replay_effects=replay_effects, force=force)
        for (_, new), item in zip(again, items, strict=True):
            if item["status"] == 200 and self._dropped(new) is not None:
                item |= {"status": 410, "code": LETTER_DROPPED, "detail": "it was dropped: it is not sent again"}
        names = [
            {"id": ids.message_id(m.transaction_id, m.message_no), "as": ids.message_id(new, 0)} for m, new in again
        ]
        return [name | item for name, item in zip(names, items, strict=True)]

    async def drop(self, letters: Sequence[StoredMessage], why: str) -> list[dict[str, Any]]:
        """Let go of letters for good; the result for each, in order: 204, or 200 where it was sent or dropped before.

        The note of it, with `why`, has the id under which the letter would be sent again.
        """
        if not letters:
            return []
        topic = dropped_topic(self.group)
        if not self._core.queues.has_topic(topic):
            self._core.topics.put_soon(Topic(topic))
        names = [ids.message_id(m.transaction_id, m.message_no) for m in letters]
        notes = [
            encode_msgpack(Payload(topic, b"", headers={FIRST_ID: name, DROPPED_WHY: why[:500]})) for name in names
        ]
        new = [
            NewTransaction(again, "", [NewMessage(topic, note)], committed=True)
            for again, note in zip(await self._ids_again(letters), notes, strict=True)
        ]
        results = await self._core.queues.put(new, self._core.clock())
        statuses = [204 if result.put is Put.STORED else 200 for result in results]
        return [{"id": name, "status": status} for name, status in zip(names, statuses, strict=True)]

    async def dropped(self, letters: Sequence[StoredMessage]) -> list[str | None]:
        """Who dropped each letter, and why; None for one that nobody dropped."""
        return [self._dropped(again) for again in await self._ids_again(letters)]

    def _dropped(self, again: bytes) -> str | None:
        topic = dropped_topic(self.group)
        for m in self._core.queues.messages(again):
            if m.topic == topic and not m.corrupt:
                return (decode_payload(m.payload).headers or {}).get(DROPPED_WHY, "")
        return None
