"""The queues role of a storage: a protocol for each thing that is asked of queues, and the role that has them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from notify.storage.bridged import BridgeState
from notify.storage.groups import Priorities, Progress, SettleKind, Settlement, Subscription
from notify.storage.records import NewTransaction, PutResult, StoredMessage
from notify.storage.topics import Topic
from notify.storage.transactions import TopicStore, TransactionStore
from notify.wire import BridgeBatch


class MessageStore(Protocol):
    """The messages in queues."""

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """First retained offset and the offset after the last visible one."""
        ...

    def count(self, topic: str, queue: int, first: int, end: int) -> int:
        """How many messages have offsets in [first, end), those included that retention dropped. Offsets that a restore
        left free are not counted."""
        ...

    def gaps(self, topic: str, queue: int) -> list[tuple[int, int]]:
        """Runs of offsets that a restore left free, in order, each as its first offset and the one behind its last."""
        ...

    def read(self, topic: str, queue: int, offset: int, limit: int, max_bytes: int) -> list[StoredMessage]:
        """Messages from `offset` on, in order; offsets may have gaps where retention dropped messages."""
        ...

    def read_tagged(
        self, topic: str, queue: int, offset: int, limit: int, max_bytes: int, tags: frozenset[int]
    ) -> tuple[list[StoredMessage], int]:
        """Those of the next `limit` messages whose tag has one of these hashes, and the offset behind all `limit`.

        The tags are looked for in the index: bodies of other messages are not read.
        """
        ...

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> Iterator[StoredMessage]:
        """Messages of a key, committed in [from, until), the oldest first; by the index. Each is read when it is
        asked for: they may have gigabytes."""
        ...

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        """The first offset committed at or after the time."""
        ...

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        """The places of a transaction's messages in queues, retained entries only."""
        ...

    def trim(self, topic: str, queue: int, offset: int) -> None:
        """Let go of a queue's messages below an offset, settled or not; not waited for."""
        ...

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        """The settlements of the message at an offset, in order; for administrators, as it may read much.

        False beside it: only a part of what was recorded since could be read.
        """
        ...

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        """Call `callback(topics)` on the event loop whenever messages became visible in topics."""
        ...


class DelayStore(Protocol):
    """Messages that wait for their time."""

    def delayed(self) -> int:
        """How many messages wait for their time."""
        ...

    def release_due(self, now_us: int, limit: int) -> int:
        """Give delayed messages that are due their queue offset; how many there were."""
        ...

    def next_due_us(self) -> int | None:
        """When the next delayed message is due."""
        ...


class GroupStore(Protocol):
    """Consumer groups: what they subscribe to, and how."""

    def subscriptions(self) -> list[Subscription]: ...

    def subscription(self, group: str, topic: str) -> Subscription | None: ...

    def subscribe_soon(self, subscription: Subscription, offsets: Sequence[int] | None) -> None:
        """Like `subscribe`, without waiting; whatever is durable later comes after it."""
        ...

    async def subscribe(self, subscription: Subscription, offsets: Sequence[int] | None) -> Subscription:
        """Make or change a subscription; `offsets` (one a queue) moves it, None keeps where it stands."""
        ...

    async def unsubscribe(self, group: str, topic: str) -> None: ...

    def patterns(self) -> list[Subscription]:
        """Subscriptions to be: `topic` is a pattern with `*`."""
        ...

    async def set_pattern(self, subscription: Subscription) -> None: ...

    async def drop_pattern(self, group: str, pattern: str) -> None: ...

    def priorities(self, group: str) -> Priorities | None: ...

    async def set_priorities(self, group: str, priorities: Priorities) -> None: ...

    async def pause(self, group: str, paused: bool) -> None:
        """Note that a group is, or is no longer, paused; forgotten with its last subscription."""
        ...

    def paused(self) -> frozenset[str]: ...


class ProgressStore(Protocol):
    """How far groups have come."""

    def progress(self, group: str, topic: str, queue: int) -> Progress:
        """The group's live progress in a queue; changed only through `settle` and `attempted`."""
        ...

    async def settle(
        self, group: str, topic: str, queue: int, runs: Iterable[tuple[int, int]], kind: SettleKind, now_us: int
    ) -> None:
        """Record offset runs (first, count) as done with."""
        ...

    def settle_soon(self, group: str, topic: str, queue: int, runs: list[tuple[int, int]], kind: SettleKind) -> None:
        """Like `settle`, without waiting; `sync` waits for it."""
        ...

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, int, int]]) -> None:
        """Record (offset, attempts so far, when it is due again; 0: now); not waited for."""
        ...

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        """Move messages to the group's dead-letter topic with a new payload each, atomically; `sync` waits for it."""
        ...

    async def sync(self) -> None:
        """Wait until everything so far is durable."""
        ...


class BridgedStore(Protocol):
    """Where bridges stand, and what they bring."""

    def bridges(self) -> list[BridgeState]: ...

    async def append_from_bridge(
        self, source: str, batch: BridgeBatch, transactions: Sequence[NewTransaction], now_us: int
    ) -> list[PutResult]:
        """Append a bridge's transactions and its position, both or neither; durable when it returns.

        `transactions`: those of the batch that were admitted. Raises Conflict where another position is recorded than
        the one expected, or a newer bridge writes; IdsInUse where the batch is to be refused whole for its ids.
        """
        ...


class QueueStore(TopicStore, MessageStore, DelayStore, GroupStore, ProgressStore, BridgedStore, Protocol):
    """The whole role."""

    async def create_topic(self, topic: Topic) -> Topic:
        """Like `create_topic_soon`, and durable when it returns; the number of queues may only grow."""
        ...

    async def delete_topic(self, name: str) -> None: ...


@runtime_checkable
class Store(TransactionStore, QueueStore, Protocol):
    """A storage that plays both roles."""


def queues_of(store: TransactionStore) -> Store | None:
    """The storage in its other role; None where messages get into queues by a bridge or a relay.

    Looks at every method: to be called once, when something is made of the storage.
    """
    return store if isinstance(store, Store) else None
