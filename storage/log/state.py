"""The log's state in memory, and the changes to it that replay and the running store have in common.

The state is small: undecided and unsettled messages, and numbers for each queue. Messages, even delayed ones, stay in
the log. Replay (replay.py) builds it from the records; a checkpoint (checkpoint.py) saves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from notify.errors import NotFound
from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Subscription
from notify.storage.log.dedupes import Dedupes
from notify.storage.log.entry import group_number_of
from notify.storage.log.gaps import OFFSETS_APART, Gaps
from notify.storage.log.parts import Parts
from notify.storage.log.pending import PendingTable
from notify.storage.log.queues import LogTopic, Queue, TopicsById, queue_key
from notify.storage.log.times import TimeIndex
from notify.storage.log.withdrawals import Withdrawals
from notify.storage.progress import QueueProgress


class LogState:
    """Everything that replay rebuilds."""

    def __init__(self) -> None:
        self.topics: dict[str, LogTopic] = {}
        self.topics_by_id = TopicsById()
        self.pending = PendingTable(self.topics_by_id)
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.patterns: dict[tuple[str, str], Subscription] = {}
        """Subscriptions that begin when a topic of a matching name is made."""
        self.priorities: dict[str, Priorities] = {}
        self.progress: dict[tuple[str, int, int], QueueProgress] = {}
        self.paused: set[str] = set()
        self.bridges: dict[str, BridgeState] = {}
        self.bridge_bases: dict[str, str] = {}
        """The text that the long positions of each source refer to."""
        self.producer_groups: list[str] = [""]
        """Producer groups by their number in entries; 0: not recorded."""
        self.producer_numbers: dict[str, int] = {"": 0}
        self.moved: dict[int, int] = {}
        """Payloads that were moved out of dropped segments: the position in entries, to the current position."""
        self.dropped_to = 0
        """Position below which segments were dropped on purpose, so that readers do not take it for a loss."""
        self.generation = 1
        """Generation of the log. It grows by one with each restore from shipped segments."""
        self.gaps = Gaps()
        self.parts = Parts()
        self.times = TimeIndex(self.parts)
        self.withdrawals = Withdrawals()
        self.dedupes = Dedupes()

    def queue(self, topic: str, number: int) -> Queue:
        """Raises NotFound."""
        known = self.topics.get(topic)
        if known is None or not 0 <= number < len(known.queues):
            raise NotFound(f"there is no queue {number} of topic {topic!r}")
        return known.queues[number]

    def group_progress(self, group: str, topic_id: int, queue: int) -> QueueProgress:
        key = (group, topic_id, queue)
        progress = self.progress.get(key)
        if progress is None:
            progress = self.progress[key] = self._progress_from(0, topic_id, queue)
        return progress

    def _progress_from(self, offset: int, topic_id: int, queue: int) -> QueueProgress:
        """A group's progress from an offset on. The gaps count as settled, because they have no messages."""
        progress = QueueProgress(offset)
        for first, count in self.gaps.of(queue_key(topic_id, queue)):
            progress.settle(first, count)
        return progress

    def move_starts_of(self, keys: Sequence[int]) -> None:
        """Move the beginning of these queues, except those of deleted topics."""
        topics = [self.topics_by_id.get(key >> 16) for key in keys]
        self.move_starts([t.queues[key & 0xFFFF] for t, key in zip(topics, keys, strict=True) if t is not None])

    def move_starts(self, queues: Sequence[Queue]) -> None:
        """Parts were dropped: move the beginning of these queues to their first remaining message."""
        firsts = self.parts.first_offsets(np.array([queue.key for queue in queues], np.uint64))
        for queue, first in zip(queues, firsts.tolist(), strict=True):
            queue.start = max(queue.start, first if first >= 0 else queue.visible)

    # --- changes ----------------------------------------------------------------------------------------------

    def set_topic(self, topic_id: int, name: str, queues: int) -> LogTopic:
        """The topic of a name, made or grown if necessary."""
        topic = self.topics.get(name)
        if topic is None:
            topic = LogTopic.numbered(topic_id, name, queues)
            self.topics[name] = self.topics_by_id[topic_id] = topic
            self._skip_earlier(topic.queues)
        before = len(topic.queues)
        topic.grow(queues)
        self._skip_earlier(topic.queues[before:])
        return topic

    def _skip_earlier(self, queues: Sequence[Queue]) -> None:
        """Begin new queues of a restored log after a gap: a lost part of the log may have had them."""
        skipped = (self.generation - 1) * OFFSETS_APART
        for queue in queues if skipped else ():
            self.gaps.add(queue.key, 0, skipped)
            queue.next_offset = queue.visible = skipped

    def begin_generation(self, generation: int) -> None:
        """The log is a restored one from here on: every queue continues after the offsets that were lost."""
        apart = (generation - self.generation) * OFFSETS_APART
        self.generation = generation
        for topic in self.topics_by_id.values():
            for queue in topic.queues:
                self.gaps.add(queue.key, queue.next_offset, apart)
                queue.next_offset += apart
                queue.visible = queue.next_offset
        for (_, topic_id, number), progress in self.progress.items():
            for first, count in self.gaps.of(queue_key(topic_id, number))[-1:]:
                progress.settle(first, count)

    def drop_topic(self, name: str) -> None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            topic.deleted = True
            for key in [key for key in self.subscriptions if key[1] == name]:
                self.drop_subscription(*key)

    def set_subscription(self, subscription: Subscription, offsets: list[int] | None) -> None:
        self.subscriptions[(subscription.group, subscription.topic)] = subscription
        topic = self.topics[subscription.topic]
        if offsets is not None:
            for queue, offset in enumerate(offsets):
                self.progress[(subscription.group, topic.id, queue)] = self._progress_from(offset, topic.id, queue)

    def drop_subscription(self, group: str, topic: str) -> None:
        self.subscriptions.pop((group, topic), None)
        if not any(key[0] == group for key in self.subscriptions):
            self.paused.discard(group)
        for key in [key for key in self.progress if key[0] == group]:
            known = self.topics_by_id.get(key[1])
            if known is None or known.name == topic:
                del self.progress[key]

    def set_paused(self, group: str, paused: bool) -> None:
        if paused:
            self.paused.add(group)
        else:
            self.paused.discard(group)

    def set_producer_group(self, number: int, name: str) -> None:
        while len(self.producer_groups) <= number:  # damage took some records
            self.producer_groups.append("")
        self.producer_groups[number] = name
        self.producer_numbers[name] = number

    def producer_group_of(self, entry: bytes) -> str | None:
        """The producer group of an entry; None: not recorded."""
        return self._group_by_number(group_number_of(entry))

    def _group_by_number(self, number: int) -> str | None:
        return self.producer_groups[number] or None if number < len(self.producer_groups) else None

    def group_of(self, transaction_id: bytes) -> str | None:
        """The producer group of a transaction; None if it is unknown or had none."""
        pending = self.pending.by_id.get(transaction_id)
        if pending is not None:
            return pending.producer.group or None
        for part in self.parts.holding(transaction_id):
            number = part.group_number(transaction_id)
            if number:
                return self._group_by_number(number)
        return None
