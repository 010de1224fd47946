"""The dead letters of this server's own groups: the engine of `letters` over the queues of its log."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from notify.errors import InvalidRequest, NotFound
from notify.protocol import ids
from notify.protocol.large_bodies import ENCODING, PLACE, ZSTD, reference_of
from notify.protocol.message import EDITED, FIRST_ID
from notify.protocol.wire import JsonMessage, PackedMessage, Payload, decode_payload, encode_msgpack, instant
from notify.server.core.admission import new_messages
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.server.groups import purging
from notify.server.groups.sending_again import send_to_group
from notify.server.letters.engine import (
    LOOKED_AT_ONCE,
    LOT_BYTES,
    WAS_DROPPED,
    Bounds,
    Change,
    Closing,
    Fate,
    Look,
    Part,
    look_at,
)
from notify.server.letters.failures import LetterCounts
from notify.server.message_pages import backwards
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage, Transaction
from notify.storage.topics import Topic

LOOKED_AT = 20_000
"""The most dead letters that one request looks at; its answer says where to continue."""
DROPPED_WHY = "notify-dropped"
"""The header with who dropped a letter, and why, in the note that records the drop."""
BODY = ("body", "body_base64")


@dataclass(slots=True)
class OwnLetter:
    """A message in the queue of a group's dead letters."""

    message: StoredMessage

    @property
    def number(self) -> int:
        return self.message.offset

    @property
    def id(self) -> str:
        return ids.message_id(self.message.transaction_id, self.message.message_no)

    @property
    def dead_us(self) -> int:
        return self.message.committed_us

    @property
    def size(self) -> int:
        return len(self.message.payload)

    @property
    def is_damaged(self) -> bool:
        return self.message.corrupt

    def payload(self) -> Payload:
        return decode_payload(self.message.payload)

    def alone(self) -> OwnLetter:
        return OwnLetter(msgspec.structs.replace(self.message, payload=b""))

    def shown(self, fate: Fate) -> dict[str, Any]:
        is_redriven, is_dropped = fate is Fate.REDRIVEN, fate is Fate.DROPPED
        state = {"dead_at": instant(self.dead_us), "redriven": is_redriven, "dropped": is_dropped}
        return json_pulled(self.message) | state


def _id_again(letter: StoredMessage) -> bytes:
    """The transaction id under which a letter was or would be closed."""
    return redriven_id(letter.topic, letter.transaction_id, letter.offset)


class OwnLetters:
    """The dead letters of the own groups. Every method raises WrongRole if the server has no queues.

    A letter that is redriven or dropped gets a transaction whose id is derived from its place: so it is closed once,
    however often this is asked for.
    """

    most_looked_at = LOOKED_AT
    closes_alone = True

    def __init__(self, core: Core) -> None:
        self._core = core
        self.counts = LetterCounts(self)

    def count(self, group: str) -> int:
        """The number of a group's letters that were neither redriven nor dropped."""
        bounds = self._bounds(group)
        return max(0, bounds.most - self.counts.closed_of(group, bounds.since))

    async def counted(self, prefix: str) -> list[dict[str, Any]]:
        first = dead_letter_topic("")
        names = [t.name.removeprefix(first) for t in self._core.queues.topics() if t.name.startswith(first + prefix)]
        rows = []
        for name in names:
            if letters := self._bounds(name).most:
                count = self.count(name)
                rows.append({"group": name, "count": count, "redriven": letters - count})
        return rows

    # --- reading ----------------------------------------------------------------------------------------------

    async def bounds(self, group: str, *, fresh: bool = False) -> Bounds:
        return self._bounds(group)

    def _bounds(self, group: str) -> Bounds:
        queues, topic = self._core.queues, dead_letter_topic(group)
        if not queues.has_topic(topic):
            return Bounds(0, 0, 0, 0)
        start, end = queues.bounds(topic, 0)
        return Bounds(start, end, queues.count(topic, 0, start, end), start)

    async def read(self, group: str, number: int, look: Look) -> Part[OwnLetter]:
        letters = self._forwards(group, number, look.at_once)
        return look_at(letters, number, look, look.at_once, most_bytes=LOT_BYTES)

    def _forwards(self, group: str, number: int, at_once: int) -> Iterator[OwnLetter]:
        while batch := self._read(group, number, at_once):
            yield from map(OwnLetter, batch)
            number = batch[-1].offset + 1

    def _read(self, group: str, number: int, most: int) -> list[StoredMessage]:
        queues, topic = self._core.queues, dead_letter_topic(group)
        return queues.read(topic, 0, number, most, LOT_BYTES) if queues.has_topic(topic) else []

    async def read_back(self, group: str, before: int, look: Look) -> Part[OwnLetter]:
        start, end, _, _ = self._bounds(group)
        if start == end:
            return Part([], before, 0, True)
        first = min(end, before or end)
        letters = map(OwnLetter, backwards(self._core.queues, dead_letter_topic(group), 0, first))
        part = look_at(letters, first, look, look.at_once, most_bytes=LOT_BYTES, backwards=True)
        part.is_over = part.is_over or part.next <= start
        return part

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._core.searches.turn():
            yield

    async def indexed(self, group: str, ids: Collection[str]) -> list[OwnLetter]:
        letters: list[OwnLetter] = []
        names = sorted(set(ids))
        for first in range(0, len(names), LOOKED_AT_ONCE):
            async with self.turn():
                for name in names[first : first + LOOKED_AT_ONCE]:
                    letters += self._indexed(group, name)
        return letters

    def _indexed(self, group: str, message_id: str) -> list[OwnLetter]:
        try:
            transaction_id, number = ids.parse_message_id(message_id)
        except ValueError:
            return []
        return [
            OwnLetter(m).alone()
            for m in self._core.queues.messages(transaction_id)
            if m.topic == dead_letter_topic(group) and m.message_no == number and not m.corrupt
        ]

    async def lot(self, group: str, letters: Sequence[OwnLetter]) -> tuple[list[OwnLetter], Sequence[OwnLetter]]:
        lot: list[OwnLetter] = []
        size = looked_at = 0
        for letter in letters:
            looked_at += 1
            for message in self._read(group, letter.number, 1):
                if message.offset == letter.number and not message.corrupt:
                    lot.append(OwnLetter(message))
                    size += len(message.payload)
            if size >= LOT_BYTES or len(lot) >= LOOKED_AT_ONCE:
                break
        return lot, letters[looked_at:]

    # --- closing ----------------------------------------------------------------------------------------------

    async def fates(self, group: str, letters: Sequence[OwnLetter]) -> list[Fate]:
        again = [_id_again(letter.message) for letter in letters]
        with self._core.searches.waiting():  # for a sync
            states = await self._core.queues.states(again)
        return [
            Fate.OPEN if state is None else Fate.REDRIVEN if self._dropped(group, new_id) is None else Fate.DROPPED
            for new_id, state in zip(again, states, strict=True)
        ]

    async def closed_by(self, group: str, letter: StoredMessage) -> tuple[Transaction, str | None] | None:
        """(the transaction that redrove or dropped a letter, who dropped it, and why, or None); None if it is open."""
        new_id = _id_again(letter)
        transaction = await self._core.queues.transaction(new_id)
        return None if transaction is None else (transaction, self._dropped(group, new_id))

    def _dropped(self, group: str, new_id: bytes) -> str | None:
        """Who dropped the letter with this id, and why; None if nobody did."""
        topic = dropped_topic(group)
        for message in self._core.queues.messages(new_id):
            if message.topic == topic and not message.corrupt:
                return (decode_payload(message.payload).headers or {}).get(DROPPED_WHY, "")
        return None

    async def check(self, group: str, how: Closing) -> None:
        """The own queues take all: what cannot be redriven is refused letter by letter."""

    async def close(self, group: str, letters: Sequence[OwnLetter], how: Closing) -> list[dict[str, Any]]:
        if not letters:
            return []
        messages = [letter.message for letter in letters]
        again = [_id_again(message) for message in messages]
        if how.drop:
            return await self._drop(group, letters, again, how.drop)
        to_send = list(zip(messages, again, strict=True))
        items = await send_to_group(self._core, group, to_send, replay_effects=how.replay_effects, force=how.force)
        for new_id, item in zip(again, items, strict=True):
            if item["status"] == 200 and self._dropped(group, new_id) is not None:
                item |= WAS_DROPPED
        return [
            {"id": letter.id, "as": ids.message_id(new_id, 0)} | item
            for letter, new_id, item in zip(letters, again, items, strict=True)
        ]

    async def _drop(
        self, group: str, letters: Sequence[OwnLetter], again: Sequence[bytes], why: str
    ) -> list[dict[str, Any]]:
        """Store a note with `why` under the id under which each letter would be redriven."""
        topic = dropped_topic(group)
        if not self._core.queues.has_topic(topic):
            self._core.topics.put_soon(Topic(topic))
        notes = [
            encode_msgpack(Payload(topic, b"", headers={FIRST_ID: letter.id, DROPPED_WHY: why[:500]}))
            for letter in letters
        ]
        transactions = [
            NewTransaction(new_id, "", [NewMessage(topic, note)], committed=True)
            for new_id, note in zip(again, notes, strict=True)
        ]
        results = await self._core.queues.put(transactions, self._core.clock())
        return [
            {"id": letter.id, "status": 204 if result.put is Put.STORED else 200}
            for letter, result in zip(letters, results, strict=True)
        ]

    def rewrite(self, letter: OwnLetter, changes: Mapping[str, Any]) -> tuple[OwnLetter, list[str]]:
        """The message's header EDITED has the names of the fields, too.

        `changes`: `body` (text) or `body_base64`, `key`, `tag`, `headers`, within the bounds of any message; an empty
        key or tag removes it. The server's headers (notify-…) stay. Raises InvalidRequest, TooLarge.
        """
        before = letter.payload()
        old_headers = before.headers or {}
        server_headers = {name: value for name, value in old_headers.items() if name.startswith("notify-")}
        user_headers = {name: value for name, value in old_headers.items() if name not in server_headers}
        body = {name: changes[name] for name in BODY if name in changes}
        rest: dict[str, Any] = {
            "key": changes.get("key", before.key) or None,
            "tag": changes.get("tag", before.tag) or None,
            "headers": changes.get("headers", user_headers),
        }
        edited: JsonMessage | PackedMessage = JsonMessage(topic=before.topic, **body, **rest)
        if not body:
            edited = PackedMessage(before.topic, body=before.body, **rest)
        (new,) = new_messages([edited], self._core.clock(), lambda _: True, lambda _: None)
        after = decode_payload(new.payload)
        pairs = {
            "body": (before.body, after.body),
            "key": (before.key, after.key),
            "tag": (before.tag, after.tag),
            "headers": (user_headers, after.headers or {}),
        }
        changed = [name for name, (was, will_be) in pairs.items() if was != will_be]
        if not changed:
            raise InvalidRequest(
                "nothing differs from the dead letter: redrive it, or change its body, key, tag or headers"
            )
        new_headers = dict(after.headers or {})
        is_zstd = old_headers.get(ENCODING) == ZSTD
        if "body" not in changed or reference_of(after.body) is not None:
            new_headers |= {ENCODING: ZSTD} if is_zstd else {}
        else:  # the new body stands in the message itself, as it is
            server_headers.pop(PLACE, None)
            if is_zstd:
                new_headers.pop(ENCODING, None)
        headers = new_headers | server_headers | {EDITED: ", ".join(changed)}
        payload = encode_msgpack(Payload(before.topic, after.body, after.key, after.tag, headers, before.ttl))
        return OwnLetter(msgspec.structs.replace(letter.message, payload=payload)), changed

    async def purge(self, group: str, before: str | int) -> Change:
        topic = self._core.queues.topic(dead_letter_topic(group))
        if topic is None:
            raise NotFound(f"group {group[:100]!r} has no dead letters")
        preview = purging.preview(self._core, topic, before)
        return Change(preview, lambda: purging.drop(self._core, topic, preview))
