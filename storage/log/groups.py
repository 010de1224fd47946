"""Consumer groups of the log: what they subscribe to, how far they are, and their dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from notify.errors import NotFound
from notify.storage.groups import Priorities, SettleKind, Subscription
from notify.storage.log.format import (
    ENTRY_HEAD,
    ENTRY_SIZE,
    ENTRY_TAIL,
    RECORD_HEADER_SIZE,
    EntryKind,
    RecordType,
    crc32c,
)
from notify.storage.log.journal import Journal
from notify.storage.log.state import LogState, encode
from notify.storage.names import dead_letter_topic
from notify.storage.progress import QueueProgress
from notify.storage.records import StoredMessage
from notify.storage.topics import Topic


class LogGroups:
    """Mixed into LogStore."""

    state: LogState
    journal: Journal

    if TYPE_CHECKING:

        def create_topic_soon(self, topic: Topic) -> None:
            """Given by LogTopics."""

    def subscriptions(self) -> list[Subscription]:
        return list(self.state.subscriptions.values())

    def subscription(self, group: str, topic: str) -> Subscription | None:
        return self.state.subscriptions.get((group, topic))

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        if subscription.topic not in self.state.topics:
            raise NotFound(f"there is no topic {subscription.topic!r}")
        moved = None if offsets is None else list(offsets)
        self.journal.append_meta(encode(("subscribe", msgspec.to_builtins(subscription), moved)))
        self.state.set_subscription(subscription, moved)

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        self.subscribe_soon(subscription, offsets)
        await self.journal.sync()
        return subscription

    async def unsubscribe(self, group: str, topic: str) -> None:
        if (group, topic) not in self.state.subscriptions:
            raise NotFound(f"group {group!r} has no subscription to {topic!r}")
        self.journal.append_meta(encode(("unsubscribe", group, topic)))
        self.state.drop_subscription(group, topic)
        await self.journal.sync()

    def patterns(self) -> list[Subscription]:
        return list(self.state.patterns.values())

    async def set_pattern(self, subscription: Subscription) -> None:
        self.journal.append_meta(encode(("pattern", msgspec.to_builtins(subscription))))
        self.state.patterns[(subscription.group, subscription.topic)] = subscription
        await self.journal.sync()

    async def drop_pattern(self, group: str, pattern: str) -> None:
        if (group, pattern) not in self.state.patterns:
            raise NotFound(f"group {group!r} does not subscribe to {pattern!r}")
        self.journal.append_meta(encode(("drop_pattern", group, pattern)))
        del self.state.patterns[(group, pattern)]
        await self.journal.sync()

    def priorities(self, group: str) -> Priorities | None:
        return self.state.priorities.get(group)

    async def set_priorities(self, group: str, priorities: Priorities) -> None:
        self.journal.append_meta(encode(("priorities", group, msgspec.to_builtins(priorities))))
        self.state.priorities[group] = priorities
        await self.journal.sync()

    async def pause(self, group: str, paused: bool) -> None:
        self.journal.append_meta(encode(("pause", group, paused)))
        self.state.set_paused(group, paused)
        await self.journal.sync()

    def paused(self) -> frozenset[str]:
        return frozenset(self.state.paused)

    def progress(self, group: str, topic: str, queue: int) -> QueueProgress:
        return self.state.group_progress(group, self.state.queue(topic, queue).topic.id, queue)

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        self.settle_soon(group, topic, queue, list(runs), kind)
        await self.journal.sync()

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        """Settle without waiting for the disk; `sync` waits for it and for everything before it."""
        found = self.state.queue(topic, queue)
        self.journal.reserve(256 + 24 * len(runs))
        progress = self.state.group_progress(group, found.topic.id, queue)
        for first, count in runs:
            progress.settle(first, count)
        record = encode((int(kind), group, found.topic.id, queue, runs))
        self.journal.append(RecordType.PROGRESS, [], record)

    async def sync(self) -> None:
        """Wait until everything so far is durable."""
        await self.journal.sync()

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, int, int]]) -> None:
        found = self.state.queue(topic, queue)
        self.journal.reserve(256 + 32 * len(offsets))
        self.state.group_progress(group, found.topic.id, queue).again(offsets)
        record = encode(("attempts", group, found.topic.id, queue, list(offsets)))
        self.journal.append(RecordType.PROGRESS, [], record)

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        name = dead_letter_topic(group)
        self.journal.reserve(8192 + sum(len(payload) + 256 for _, payload in messages))
        if name not in self.state.topics:
            self.create_topic_soon(Topic(name))
        queue = self.state.topics[name].queues[0]
        settled = []
        for message, _ in messages:
            source = self.state.queue(message.topic, message.queue)
            self.state.group_progress(group, source.topic.id, message.queue).settle(message.offset, 1)
            run = (message.offset, 1)
            settled.append((int(SettleKind.DEAD_LETTER), group, source.topic.id, message.queue, (run,)))
        meta = encode(settled)
        position = self.journal.end + RECORD_HEADER_SIZE + len(messages) * ENTRY_SIZE + 4 + len(meta)
        entries = []
        for message, payload in messages:
            offset = queue.next_offset
            queue.next_offset = offset + 1
            head = ENTRY_HEAD.pack(EntryKind.QUEUE, 0, 0, queue.topic.id, now_us, offset)
            tail = ENTRY_TAIL.pack(
                position,
                len(payload),
                message.message_no,
                0,
                0,
                message.transaction_id,
                message.tag_hash,
                crc32c(payload),
                0,
            )
            position += len(payload)
            entries.append(head + tail)
        opened = self.journal.open
        data = len(meta).to_bytes(4, "little") + meta + b"".join([payload for _, payload in messages])
        self.journal.append(RecordType.DEAD_LETTER, entries, data)
        opened.entries += entries
        opened.queues += [queue] * len(entries)
        opened.part.assigned += len(entries)
        opened.points.add("dead_letter")
