"""Dead letters of a group, and sending them to it again through a retry topic that is the group's alone."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from notify import ids
from notify.errors import InvalidRequest, NotFound, NotifyError
from notify.filter import Filter
from notify.message import DEAD_LETTER_REASON, FIRST_ID, REPLAY
from notify.server.core.core import Core
from notify.server.delivery.inboxes import refuse_letter
from notify.server.jobs.failures import kind_of
from notify.server.newest import backwards
from notify.storage.groups import Subscription
from notify.storage.names import dead_letter_topic, dropped_topic, redriven_id, redriven_id_without_topic, retry_topic
from notify.storage.records import NewMessage, NewTransaction, Put, StoredMessage, Transaction
from notify.storage.topics import Topic
from notify.wire import Payload, decode_payload, encode_msgpack, microseconds

AT_ONCE = 4096
READ_BYTES = 8 << 20
LOOKED_AT_ONCE = 500
"""Dead letters that are looked at in one go: a search through all must not hold up everyone else."""
SEARCH_SHARE = 0.15
"""All searches together may use so much of the server's time."""


LETTER_DROPPED = "dropped"
"""The code of a letter that is not sent again because it was dropped."""
DROPPED_WHY = "notify-dropped"
"""The header of a note of a dropped letter that says who dropped it, and why."""
EFFECTS_KEPT = "handlers with an inbox do nothing for messages that took effect before; those without run again"
EFFECTS_AGAIN = "handlers with an inbox take effect again, also for messages that took effect before"


def next_replay(s: Subscription) -> Subscription:
    """The subscription with a replay number that it never had: from now on inboxes take its messages for new ones."""
    number = max(s.replay, s.last_replay) + 1
    return dataclasses.replace(s, replay=number, last_replay=number)


@dataclass(slots=True)
class Wanted:
    """Which dead letters: what is empty matches all."""

    topic: str = ""
    tag: str = ""
    key: str = ""
    contains: str = ""
    filter: str = ""
    dead_from: str = ""
    dead_to: str = ""
    failure: str = ""
    """The fingerprint of a failure group."""
    _filter: Filter | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.filter:
            self._filter = Filter(self.filter)

    @property
    def at_once(self) -> int:
        """How many may be looked at in one go."""
        return LOOKED_AT_ONCE if self._filter is None else min(LOOKED_AT_ONCE, self._filter.at_once)

    def plain(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def matches(self, m: StoredMessage) -> bool:
        return not m.corrupt and self.fits(decode_payload(m.payload), m.committed_us)

    def fits(self, p: Payload, dead_us: int) -> bool:
        """Whether a dead letter of this content, dead since `dead_us` (microseconds since 1970), is one of them."""
        if self.dead_from and dead_us < microseconds(datetime.fromisoformat(self.dead_from)):
            return False
        if self.dead_to and dead_us >= microseconds(datetime.fromisoformat(self.dead_to)):
            return False
        reason = (p.headers or {}).get(DEAD_LETTER_REASON, "")
        return (
            self.topic in ("", p.topic)
            and self.tag in ("", p.tag)
            and self.key in ("", p.key)
            and self.contains in reason
            and self.failure in ("", kind_of(reason).fingerprint)
            and (self._filter is None or self._filter.fits(p))
        )


class Redriving(Protocol):
    """Sends a group's dead letters again, some at a time, whoever keeps them."""

    async def bounds(self, group: str) -> tuple[int, int, int]:
        """The offset of a group's first letter, the one behind its last, and how many there are at most between them.

        Raises Unavailable.
        """
        ...

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        """Look at the next few from an offset on, at most `most`, and send (or drop) those that match.

        Gives what became of each, and the offset to go on from; None where none is left. Repeating it sends none twice.
        Raises Unavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class RedriveSpec:
    """Which letters of a group a job sends, or drops: those of offsets before `until` that match."""

    group: str
    wanted: Wanted
    until: int
    replay_effects: bool = False
    force: bool = False
    drop: str = ""
    """Who drops them, and why; empty: they are sent."""


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
        self, wanted: Wanted, offset: int, limit: int, *, not_redriven: bool = False
    ) -> tuple[list[StoredMessage], int]:
        """Those that match from an offset on, and the offset to go on from."""
        found: list[StoredMessage] = []
        while len(found) < limit:
            async with self._core.one_search:
                began = time.perf_counter()
                offset, more = await self._look(wanted, offset, limit - len(found), not_redriven, found)
                # Others have their turn, and most of the time.
                await asyncio.sleep((time.perf_counter() - began) * (1 / SEARCH_SHARE - 1))
            if not more:
                break
        return found, offset

    async def find_newest(self, wanted: Wanted, before: int, limit: int) -> tuple[list[StoredMessage], int]:
        """Those that match and lie before an offset (0: all), the newest first, and the offset to go on before.

        That is 0 where there are no more.
        """
        start, end, _ = self.bounds()
        found: list[StoredMessage] = []
        letters = backwards(self._core.queues, self.topic, 0, min(end, before or end)) if end > start else iter(())
        while True:
            async with self._core.one_search:
                began = time.perf_counter()
                batch = list(itertools.islice(letters, wanted.at_once))
                for m in batch:
                    if wanted.matches(m):
                        found.append(m)
                        if len(found) == limit:
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


async def send_to_group(
    core: Core,
    group: str,
    messages: Sequence[tuple[StoredMessage, bytes]],
    *,
    replay_effects: bool = False,
    force: bool = False,
) -> list[dict[str, Any]]:
    """Send messages, each under another transaction id, to one group alone; what became of each, in order.

    Those from before the group's inbox are refused without `force` or `replay_effects`.
    """
    items: list[dict[str, Any]] = []
    new: list[NewTransaction] = []
    replays: dict[str, str] = {}
    for m, again in messages:
        p = decode_payload(m.payload)
        item: dict[str, Any] = {"status": 201}
        items.append(item)
        try:
            topic = await _retry_topic(core, group, p)
            followed = _followed(core, group, p.topic)
            if not (force or replay_effects):
                refuse_letter(core.queues, followed, m, p)
            if replay_effects and p.topic not in replays:
                replays[p.topic] = await _new_replay(core, followed)
        except NotifyError as error:
            item |= {"status": error.status, "code": error.code, "detail": str(error)}
            continue
        headers = {FIRST_ID: ids.message_id(m.transaction_id, m.message_no)} | (p.headers or {})
        if replay_effects:
            headers[REPLAY] = replays[p.topic]
        p.headers = headers
        new.append(NewTransaction(again, "", [NewMessage(topic, encode_msgpack(p), p.key, p.tag)], committed=True))
    results = iter(await core.queues.put(new, core.clock()) if new else [])
    for item in items:
        if item["status"] == 201 and next(results).put is not Put.STORED:
            item["status"] = 200
    return items


def _followed(core: Core, group: str, topic: str) -> Subscription:
    """The group's subscription to a topic. Raises NotFound where it has none any more."""
    subscription = core.queues.subscription(group, topic)
    if subscription is None:
        raise NotFound(f"group {group!r} does not subscribe to {topic!r} any more")
    return subscription


async def _new_replay(core: Core, s: Subscription) -> str:
    """A replay number for letters of a topic alone: the topic's other messages keep theirs."""
    number = next_replay(s).last_replay
    await core.delivery.following.subscribe(dataclasses.replace(s, last_replay=number), None)
    return str(number)


async def _retry_topic(core: Core, group: str, p: Payload) -> str:
    """The topic through which the group gets messages of a topic again; made and subscribed when first needed."""
    followed = _followed(core, group, p.topic)
    if followed.mode == "broadcast":
        raise InvalidRequest(f"topic {p.topic!r} is broadcast: send the message again with publish", "broadcast")
    name = retry_topic(group, p.topic)
    if core.queues.subscription(group, name) is None:
        core.topics.put_soon(Topic(name))
        wanted: Subscription = dataclasses.replace(
            followed, topic=name, of_topic=p.topic, tags=(), filter="", epoch=0, replay=0, last_replay=0
        )
        await core.delivery.following.follow_retries(wanted)
    return name
