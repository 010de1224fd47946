"""Topics of the log: making, changing and dropping them, and where their queues begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from notify.errors import InvalidRequest, NotFound
from notify.storage.groups import Subscription
from notify.storage.log.format import RecordType
from notify.storage.log.journal import Journal
from notify.storage.log.queues import Policy
from notify.storage.log.state import LogState, encode
from notify.storage.topics import Topic


class LogTopics:
    """Mixed into LogStore."""

    state: LogState
    journal: Journal

    def topics(self) -> list[Topic]:
        return [t.described() for t in self.state.topics.values()]

    def topic(self, name: str) -> Topic | None:
        t = self.state.topics.get(name)
        return None if t is None else t.described()

    def has_topic(self, name: str) -> bool:
        return name in self.state.topics

    async def create_topic(self, topic: Topic) -> Topic:
        self.create_topic_soon(topic)
        await self.journal.sync()
        return topic

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        known = self.state.topics.get(topic.name)
        if known is not None and topic.queues < len(known.queues):
            raise InvalidRequest(
                f"topic {topic.name!r} has {len(known.queues)} queues; the number can grow, not shrink"
            )
        grown = known.grown_to(topic.queues) if known is not None else ()
        starts = [0] * topic.queues
        # One frame has all of them: nothing is awaited in between.
        followers = [encode(("subscribe", msgspec.to_builtins(s), starts)) for s in followed_by]
        size = sum(16 + 9 * len(offsets) for offsets in grown) + sum(64 + len(record) for record in followers)
        self.journal.reserve(1024 + size)
        topic_id = known.id if known is not None else self.state.topics_by_id.last + 1
        changed = self.state.set_topic(topic_id, topic.name, topic.queues)
        changed.policy, changed.grown = Policy.of(topic), grown
        self.journal.append(
            RecordType.META, [], encode(("topic", topic_id, topic.name, topic.queues, *changed.record()))
        )
        for subscription, record in zip(followed_by, followers, strict=True):
            self.journal.append(RecordType.META, [], record)
            self.state.set_subscription(subscription, starts)

    async def delete_topic(self, name: str) -> None:
        if name not in self.state.topics:
            raise NotFound(f"there is no topic {name!r}")
        self.journal.reserve(1024)
        self.state.drop_topic(name)
        self.journal.append(RecordType.META, [], encode(("delete_topic", name)))
        await self.journal.sync()

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        found = self.state.queue(topic, queue)
        return found.start, found.visible

    def trim(self, topic: str, queue: int, offset: int) -> None:
        found = self.state.queue(topic, queue)
        if offset <= found.start:
            return
        self.journal.reserve(256)
        found.start = min(offset, found.visible)
        self.journal.append(RecordType.META, [], encode(("start", found.topic.id, queue, found.start)))
