"""The queues role of a storage: a protocol for each part of it, and the whole role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from notify.protocol.wire import BridgeBatch
from notify.protocol.withdrawal import Fate
from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Progress, SettleKind, Settlement, Subscription
from notify.storage.message_run import MessageRun
from notify.storage.records import NewTransaction, PutResult, StoredMessage
from notify.storage.topics import Topic
from notify.storage.transactions import TopicStore, TransactionStore
from notify.storage.withdrawals import Withdrawable, Withdrawal


class MessageStore(Protocol):
    """The messages in queues."""

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """The first retained offset, and the offset after the last visible message."""
        ...

    def count(self, topic: str, queue: int, first: int, end: int) -> int:
        """How many messages have offsets in [first, end), including messages that retention dropped.

        Offsets that a restore skipped are not counted.
        """
        ...

    def gaps(self, topic: str, queue: int) -> list[tuple[int, int]]:
        """The ranges [first, end) of offsets that a restore skipped, in order."""
        ...

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        """Messages from `offset` on, in order. Offsets of messages that retention dropped are missing."""
        ...

    def read_run(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> MessageRun | None:
        """Messages from `offset` on as one run; it ends earlier than `read` only if its bytes are too many.

        None if they are few, or if some have to be looked at, being missing, damaged or limited in time: then `read`
        them.
        """
        ...

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        """Those of the next `limit` messages whose tag has one of the hashes, and the offset after all of the `limit`.

        The index has the hashes of the tags, so that payloads of other messages are not read.
        """
        ...

    def read_hashes(
        self, topic: str, queue: int, offset: int, limit: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """(offsets, hashes of keys, hashes of tags) of the next `limit` messages, by the index alone; 0: none.

        Offsets of messages that retention dropped are missing.
        """
        ...

    def read_ids(self, topic: str, queue: int, offset: int, limit: int) -> list[tuple[int, bytes]]:
        """(committed_us, transaction id) of the next `limit` messages, by the index alone.

        Offsets of messages that retention dropped are missing.
        """
        ...

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> Iterator[StoredMessage]:
        """Messages of a key that were committed in [from, until), the oldest first; found by the index.

        Each message is read only when the iterator reaches it, because all of them may have gigabytes.
        """
        ...

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        """The first offset committed at or after the time."""
        ...

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        """The messages of a transaction that are in queues and still retained."""
        ...

    def trim(self, topic: str, queue: int, offset: int) -> None:
        """Drop a queue's messages below an offset, settled or not, without waiting until that is durable."""
        ...

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        """The settlements of the message at an offset, in order, and whether the list is complete.

        The list is incomplete if a part of the later records could not be read. The call may read much of the log: it
        is for administrators.
        """
        ...

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        """Call `callback(topics)` on the event loop whenever messages have become visible in these topics."""
        ...


class DelayStore(Protocol):
    """Delayed messages."""

    def delayed(self) -> int:
        """How many delayed messages are not due yet."""
        ...

    def release_due(self, now_us: int, limit: int) -> int:
        """Put at most `limit` delayed messages that are due into their queues; returns how many."""
        ...

    def next_due_us(self) -> int | None:
        """When the next delayed message is due, or would be if it was not withdrawn."""
        ...

    def withdrawable(self, transaction_id: bytes, number: int) -> Withdrawable | None:
        """The state of a message that is to be withdrawn; None if it is unknown."""
        ...

    def withdrawal(self, transaction_id: bytes, number: int, now_us: int) -> Withdrawal | None:
        """A message that withdraws another one, with its fate; None if it is unknown, or withdraws none."""
        ...

    def collapsed(self) -> int:
        """How many messages were collapsed into another message of their dedupe key since the storage was opened."""
        ...

    def is_full_of_keys(self) -> bool:
        """Whether the most dedupe keys have a pending message, so that no further one is accepted now."""
        ...

    def withdrawals(self) -> Mapping[Fate, int]:
        """How many withdrawals had each fate since the storage was opened."""
        ...


class GroupStore(Protocol):
    """Consumer groups and their subscriptions."""

    def subscriptions(self) -> list[Subscription]: ...

    def subscription(self, group: str, topic: str) -> Subscription | None: ...

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        """Like `subscribe`, without waiting until it is durable. Changes made after it become durable after it."""
        ...

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        """Make or change a subscription. `offsets` (one for each queue) moves the group; None keeps its offsets."""
        ...

    async def unsubscribe(self, group: str, topic: str) -> None: ...

    def patterns(self) -> list[Subscription]:
        """Subscriptions whose `topic` is a pattern with `*`: the group subscribes to each new topic that matches."""
        ...

    async def set_pattern(self, subscription: Subscription) -> None: ...

    async def drop_pattern(self, group: str, pattern: str) -> None: ...

    def priorities(self, group: str) -> Priorities | None: ...

    async def set_priorities(self, group: str, priorities: Priorities) -> None: ...

    async def pause(self, group: str, paused: bool) -> None:
        """Record whether a group is paused. The record is dropped with the group's last subscription."""
        ...

    def paused(self) -> frozenset[str]: ...


class ProgressStore(Protocol):
    """The progress of groups in queues."""

    def progress(self, group: str, topic: str, queue: int) -> Progress:
        """The group's live progress in a queue; only `settle` and `attempted` change it."""
        ...

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        """Record runs of offsets (first, count) as settled."""
        ...

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        """Like `settle`, without waiting until it is durable; `sync` waits."""
        ...

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]]) -> None:
        """Record attempts that did not settle their messages, without waiting until that is durable.

        Each is (offset, attempts so far, when the next is due or 0 for now, deaths among the attempts, interruptions,
        HOLD_RETRIED or HOLD_RELEASED if this ends the hold of its key); values of 0 at the end may be left out.
        """
        ...

    def hold(
        self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, ...]], reasons: Sequence[str]
    ) -> None:
        """Record last attempts as `attempted` does, after which the keys of these messages are held.

        Each is (offset, attempts, 0, deaths, interruptions, since when it is held); `reasons`: one each. The next
        `attempted` of the offset, or its settlement, ends the hold.
        """
        ...

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        """Move messages to the group's dead-letter topic atomically, each with a new payload; `sync` waits for it."""
        ...

    async def sync(self) -> None:
        """Wait until every change made so far is durable."""
        ...


class BridgedStore(Protocol):
    """The positions of bridges, and the transactions that they append."""

    def bridges(self) -> list[BridgeState]: ...

    def bridge_base(self, source: str) -> str:
        """The text that the long positions of a source refer to; "" if it has none."""
        ...

    async def append_from_bridge(
        self, source: str, batch: BridgeBatch, transactions: Sequence[NewTransaction], now_us: int
    ) -> list[PutResult]:
        """Append a bridge's transactions and its position atomically; they are durable when this returns.

        `transactions`: the admitted transactions of the batch. Raises Conflict if the recorded position is not the
        expected one or a newer bridge writes, and IdsInUse if the whole batch is refused because of its ids.
        """
        ...


class QueueStore(TopicStore, MessageStore, DelayStore, GroupStore, ProgressStore, BridgedStore, Protocol):
    """The whole role."""

    async def create_topic(self, topic: Topic) -> Topic:
        """Like `create_topic_soon`, but the topic is durable when this returns. The number of queues can only grow."""
        ...

    async def delete_topic(self, name: str) -> None:
        """Like `delete_topic_soon`, but durable when this returns."""
        ...

    def delete_topic_soon(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions. Raises NotFound."""
        ...


@runtime_checkable
class Store(TransactionStore, QueueStore, Protocol):
    """A storage that plays both roles."""


def queues_of(store: TransactionStore) -> Store | None:
    """The storage in the queues role; None if a bridge or a relay moves its messages into queues.

    The check looks at every method of the protocol, so call this once, when an object is made that uses the storage.
    """
    return store if isinstance(store, Store) else None
