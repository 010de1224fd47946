"""The protocols of a storage.

Every storage (the embedded log, memory) passes the one suite in tests/contract. Rules that hold for all of them:

* a method that changes something returns only once the change is durable; its results stand in request order;
* times are integers, microseconds since 1970, and are given by the caller: a storage has no clock of its own;
* ids are 16 bytes; a message is (transaction id, number);
* outcomes compare and set: the first one recorded stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from notify.storage.bridged import BridgeBatch, BridgeState
from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.groups import Priorities, Progress, SettleKind, Settlement, Subscription
from notify.storage.records import Decided, InDoubt, NewTransaction, PutResult, State, StoredMessage, Transaction
from notify.storage.topics import Topic

NO_TOKENS: Mapping[bytes, int] = {}

NO_SHARDS: Mapping[bytes, str] = {}

COUNTED_TO = 1000


async def counted(store: TransactionStore) -> InDoubt:
    """`in_doubt` of a storage that finds undecided transactions, and does not keep count of them."""
    prepared = await store.undecided(State.PREPARED, None, None, COUNTED_TO)
    parked = await store.undecided(State.PARKED, None, None, COUNTED_TO)
    first = prepared[0] if prepared else None
    return InDoubt(
        len(prepared),
        len(parked),
        first.stored_us if first is not None else 0,
        first.producer_group if first is not None else "",
        COUNTED_TO,
    )


class TransactionStore(Protocol):
    """Halves, outcomes and the schedule of checks; and which topics there are to send to."""

    def shards(self) -> Sequence[str]:
        """The shards it consists of; none where the server's settings name its only one."""
        ...

    def queues(self) -> Store | None:
        """This storage in its other role; None where messages get into queues by a bridge or a relay."""
        ...

    async def open(self, now_us: int) -> None:
        """Recover and be ready; raises StorageFailed or Corrupt with what to do."""
        ...

    async def close(self) -> None:
        """Make everything durable, then let go of files and threads."""
        ...

    async def in_doubt(self) -> InDoubt:
        """How many transactions are undecided; asked every few seconds."""
        ...

    def complaints(self) -> list[str]:
        """The damage of this storage, in a sentence each: an administrator has to look at it."""
        ...

    async def retain(self, now_us: int) -> int:
        """Let go of what is decided and whose retention is over; how many segments, or rows, were dropped."""
        ...

    def keep(self, retention_us: int, retention_bytes: int) -> None:
        """Another retention from now on: microseconds, and bytes of the log; 0: no bound."""
        ...

    def topics(self) -> list[Topic]: ...

    def topic(self, name: str) -> Topic | None: ...

    def has_topic(self, name: str) -> bool: ...

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        """Make or change a topic without waiting; whatever is durable later comes after it.

        `followed_by`: subscriptions to a topic that is new, from its first message on. They are made with the topic or
        not at all, also where the server ends meanwhile; a storage without queues has none.
        """
        ...

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        """Store halves; the same id with the same group and content is ALREADY, with other content IN_USE.

        Returns when the strictest `flush` of the topics named is reached, for all of them.

        Raises DiskFull before anything changed; PartlyStored with the results where one of several shards is away,
        or a transaction has a value that a database cannot hold.
        """
        ...

    async def decide(
        self,
        outcomes: Sequence[tuple[bytes, str | None, State]],
        now_us: int,
        forced: bool = False,
        tokens: Mapping[bytes, int] = NO_TOKENS,
        shards: Mapping[bytes, str] = NO_SHARDS,
    ) -> list[Decided]:
        """Record outcomes (id, producer group or None for an administrator, COMMITTED or ROLLED_BACK).

        One that answers a check has that check's token in `tokens`: it is `stale` where another is under way, or none.
        One of another producer group's transaction is `foreign`, whether that is decided or not.
        `shards` says where transactions are, as far as the caller knows.
        """
        ...

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        """The state of each transaction, None where the id is not known."""
        ...

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        """The producer group of each transaction, None where the id is not known, or belongs to none."""
        ...

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        """Take due checks: each gets a fresh token and is due again after `answer_within_us`."""
        ...

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        """Give claimed checks back unasked: no poller fits them. They are due again at `due_us`."""
        ...

    async def answer_check(self, answer: CheckAnswer) -> bool:
        """Record an answer that does not resolve. False if the token is no longer the current one."""
        ...

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        """How an undecided transaction's checks stand; None if it is decided or not known."""
        ...

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, anew: bool) -> bool:
        """A check due now; with `anew` back to PREPARED with all checks before it. False unless undecided."""
        ...

    async def half_payloads(self, claimed: Sequence[Due]) -> list[list[bytes]]:
        """The payloads of undecided transactions, empty where one is not known any more."""
        ...

    def ripen_checks(self, now_us: int) -> None:
        """Let go of what is decided in the schedules of groups that nobody polls."""
        ...

    def next_check_us(self, producer_group: str) -> int | None:
        """When the group's next check may be due (it may be early, never late); None if nothing is open."""
        ...

    async def transaction(self, transaction_id: bytes) -> Transaction | None: ...

    async def undecided(
        self, state: State | None, producer_group: str | None, older_than_us: int | None, limit: int
    ) -> list[Transaction]:
        """PREPARED and PARKED transactions, the oldest first."""
        ...


class QueueStore(Protocol):
    """Queues, groups and their progress; what topics there are, the transactions' role says as well."""

    async def create_topic(self, topic: Topic) -> Topic:
        """Like `create_topic_soon`, and durable when it returns; the number of queues may only grow."""
        ...

    async def delete_topic(self, name: str) -> None: ...

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """First retained offset and the offset after the last visible one."""
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

    def keyed(self, key: str, topic: str | None, from_us: int, until_us: int, limit: int) -> list[StoredMessage]:
        """Messages of a key, committed in [from, until), the oldest first; by the index, not by reading messages."""
        ...

    def trim(self, topic: str, queue: int, offset: int) -> None:
        """Let go of a queue's messages below an offset, settled or not; not waited for."""
        ...

    def delayed(self) -> int:
        """How many messages wait for their time."""
        ...

    def offset_at(self, topic: str, queue: int, time_us: int) -> int:
        """The first offset committed at or after the time."""
        ...

    def release_due(self, now_us: int, limit: int) -> int:
        """Give delayed messages that are due their queue offset; how many there were."""
        ...

    def next_due_us(self) -> int | None:
        """When the next delayed message is due."""
        ...

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

    async def sync(self) -> None:
        """Wait until everything so far is durable."""
        ...

    def attempted(self, group: str, topic: str, queue: int, offsets: Sequence[tuple[int, int, int]]) -> None:
        """Record (offset, attempts so far, when it is due again; 0: now); not waited for."""
        ...

    def dead_letter_soon(self, group: str, messages: Sequence[tuple[StoredMessage, bytes]], now_us: int) -> None:
        """Move messages to the group's dead-letter topic with a new payload each, atomically; `sync` waits for it."""
        ...

    async def settlements(self, topic: str, queue: int, offset: int) -> tuple[list[Settlement], bool]:
        """The settlements of the message at an offset, in order; for administrators, as it may read much.

        False beside it: only a part of what was recorded since could be read.
        """
        ...

    def messages(self, transaction_id: bytes) -> list[StoredMessage]:
        """The places of a transaction's messages in queues, retained entries only."""
        ...


class Store(TransactionStore, QueueStore, Protocol):
    """A storage that plays both roles."""

    def bridges(self) -> list[BridgeState]: ...

    async def append_from_bridge(self, batch: BridgeBatch, now_us: int) -> list[PutResult]:
        """Append a bridge's transactions and its position, both or neither; durable when it returns.

        Raises Conflict where another position is recorded than the one expected, or a newer bridge writes.
        """
        ...

    def on_visible(self, callback: Callable[[set[str]], None]) -> None:
        """Call `callback(topics)` on the event loop whenever messages became visible in topics."""
        ...
