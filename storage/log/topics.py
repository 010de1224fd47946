"""Topics of the log: makes, changes and drops them, and drops a queue's first messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from notify.errors import InvalidRequest, NotFound
from notify.storage.groups import Subscription
from notify.storage.log.journal import Journal
from notify.storage.log.meta import StartSet, Subscribed, TopicDeleted, encoded
from notify.storage.log.queues import Policy
from notify.storage.log.records import RecordType
from notify.storage.log.state import LogState
from notify.storage.topics import Topic


class Topics:
    """The storage's topics. Each change is a META record."""

    def __init__(self, state: LogState, journal: Journal) -> None:
        self._state = state
        self._journal = journal
        self.has: Callable[[str], bool] = state.topics.__contains__  # called for each message

    def all(self) -> list[Topic]:
        return [t.described() for t in self._state.topics.values()]

    def one(self, name: str) -> Topic | None:
        known = self._state.topics.get(name)
        return None if known is None else known.described()

    async def create(self, topic: Topic) -> Topic:
        self.create_soon(topic)
        await self._journal.sync()
        return topic

    def create_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        state = self._state
        known = state.topics.get(topic.name)
        if known is not None and topic.queues < len(known.queues):
            raise InvalidRequest(
                f"topic {topic.name!r} has {len(known.queues)} queues; the number can grow, not shrink"
            )
        grown = known.grown_to(topic.queues) if known is not None else ()
        # All go into one frame, so do not await in between.
        followers = [Subscribed(subscription, [0] * topic.queues) for subscription in followed_by]
        records = [encoded(follower) for follower in followers]
        size = sum(16 + 9 * len(offsets) for offsets in grown) + sum(64 + len(record) for record in records)
        self._journal.reserve(1024 + size)
        number = known.id if known is not None else state.topics_by_id.last + 1
        changed = state.set_topic(number, topic.name, topic.queues)
        changed.policy, changed.grown = Policy.of(topic), grown
        self._journal.append(RecordType.META, encoded(changed.record()))
        for follower, record in zip(followers, records, strict=True):
            self._journal.append(RecordType.META, record)
            state.set_subscription(follower.subscription, follower.offsets)

    def delete_soon(self, name: str) -> None:
        if name not in self._state.topics:
            raise NotFound(f"there is no topic {name!r}")
        # A broadcast may have many instances, and no record lists them.
        subscriptions = [s for s in self._state.subscriptions.values() if s.topic == name and "@" not in s.group]
        self._journal.append_meta(TopicDeleted(name, subscriptions))
        self._state.drop_topic(name)

    async def delete(self, name: str) -> None:
        self.delete_soon(name)
        await self._journal.sync()

    def trim(self, topic: str, queue: int, offset: int) -> None:
        where = self._state.queue(topic, queue)
        if offset <= where.start:
            return
        start = min(offset, where.visible)
        self._journal.append_meta(StartSet(where.topic.id, queue, start))
        where.start = start
