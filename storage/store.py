"""The protocols of a storage, and the plain records that pass between them.

Every storage (the embedded log, memory) passes the one suite in tests/contract. Rules that hold for all of them:

* a method that changes something returns only once the change is durable; its results stand in request order;
* times are integers, microseconds since 1970, and are given by the caller: a storage has no clock of its own;
* ids are 16 bytes; a message is (transaction id, number);
* outcomes compare and set: the first one recorded stays.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from notify import ids
from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.storage.runs import OffsetRuns

DEAD_LETTER_PREFIX = "dead-letter."
"""The topic of this name and a group's holds the group's dead letters."""


def dead_letter_topic(group: str) -> str:
    """The topic of a group's dead letters; the instances of a broadcast (`group@instance`) share their group's."""
    return DEAD_LETTER_PREFIX + group.partition("@")[0]


def redriven_id(topic: str, transaction_id: bytes, offset: int) -> bytes:
    """The transaction id under which a dead letter is sent again: a UUID of version 7, fixed by its place.

    `topic` is the group's dead-letter topic: letters of one transaction may have the same offset in two groups.
    """
    return ids.derived(transaction_id, offset.to_bytes(8) + topic.encode())


class State(enum.IntEnum):
    """Where a transaction stands."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


class Put(enum.IntEnum):
    """The result of storing a transaction."""

    STORED = 0
    ALREADY = 1
    IN_USE = 2


class NewMessage(msgspec.Struct, gc=False):
    """A message as it enters a storage; `payload` is its canonical encoding (notify/wire.py)."""

    topic: str
    payload: bytes
    key: str | None = None
    tag: str | None = None
    delay_us: int = 0  # counts from the recorded commit
    deliver_at_us: int = 0
    ttl_us: int = 0  # counts from when it is in its queue; the payload says the same


class NewTransaction(msgspec.Struct):
    """A half to store, or with `committed` a transaction that needs no outcome."""

    id: bytes
    producer_group: str
    messages: Sequence[NewMessage]
    source: str = ""
    instance: str = ""
    check_after_us: int = 5_000_000
    committed: bool = False


class Flush(enum.IntEnum):
    """Where a half or a message is when it is answered. All of them go to the disk with the next sync."""

    MEMORY = 0  # in the server's memory: lost with its process
    ASYNC = 1  # handed to the operating system: lost with the machine's power
    SYNC = 2  # on the disk


class PutResult(msgspec.Struct, gc=False):
    put: Put
    state: State
    flush: Flush = Flush.SYNC
    shard: str = ""  # that has it, where a storage consists of several


class PartlyStored(Unavailable):
    """Some transactions of a `put` were refused, for a while or for what is in them; the others have their results."""

    def __init__(self, results: Sequence[PutResult | NotifyError]) -> None:
        super().__init__("a part of this could not be stored")
        self.results = results


class Decided(msgspec.Struct, gc=False):
    """The answer to an outcome: `found` is false for an unknown id, `changed` true if this call decided it."""

    found: bool
    state: State = State.PREPARED
    changed: bool = False
    stale: bool = False  # the token is not that of the check that is under way
    foreign: bool = False  # the id is another producer group's


TOKEN_BITS = 62


def new_token() -> int:
    """A check's token: whoever was not handed the check cannot guess it. Above 0, which stands for none."""
    return secrets.randbits(TOKEN_BITS) + 1


NO_TOKENS: Mapping[bytes, int] = {}
NO_SHARDS: Mapping[bytes, str] = {}


class StoredMessage(msgspec.Struct, gc=False):
    """A message as a queue holds it."""

    topic: str
    queue: int
    offset: int
    transaction_id: bytes
    message_no: int
    committed_us: int
    payload: bytes  # empty with `corrupt`
    tag_hash: int = 0
    corrupt: bool = False
    key_hash: int = 0  # 0 for a message without a key
    expires_us: int = 0  # 0: never; from then on it is not delivered


@dataclass(slots=True)
class Transaction:
    """A transaction as the administrator sees it."""

    id: bytes
    producer_group: str
    state: State
    stored_us: int
    decided_us: int = 0
    source: str = ""
    instance: str = ""
    attempts: int = 0
    next_check_us: int = 0
    messages: list[StoredMessage] = field(default_factory=list)
    shard: str = ""  # that has it, where a storage consists of several
    forced: bool = False
    """An administrator decided it; False where the storage does not know."""


@dataclass(slots=True)
class Due:
    """A check to be asked now. `token` fences its answer."""

    id: bytes
    token: int
    source: str
    instance: str
    attempts: int
    topics: tuple[str, ...]
    shard: str = ""


class Checking(NamedTuple):
    """How an undecided transaction's checks stand."""

    token: int  # of the check that is under way, 0 for none
    attempts: int  # answered so far
    parked: bool
    producer_group: str = ""


class CheckAnswer(NamedTuple):
    """An answer to a check that does not resolve it: when to ask again, and how often it has been answered by now."""

    id: bytes
    token: int
    next_check_us: int
    attempts: int
    park: bool = False
    shard: str | None = None


class Backlog(enum.IntEnum):
    """The policy for a message to a topic whose slowest group is as far behind as the topic allows."""

    REFUSE = 0  # 429, to be sent again later
    HOLD = 1  # the producer waits for a moment, then 429
    DROP_OLDEST = 2  # the oldest go, settled or not


@dataclass(slots=True)
class Topic:
    name: str
    queues: int = 1
    retention_us: int = 0  # 0: the storage's default
    flush: Flush = Flush.SYNC
    retention_bytes: int = 0  # payload bytes to keep; 0: no bound
    ttl_us: int = 0  # 0: messages do not expire
    backlog: int = 0  # messages that the slowest group may be behind; 0: no bound
    backlog_policy: Backlog = Backlog.REFUSE
    grown: tuple[tuple[int, ...], ...] = ()
    """Kept by the storage. Each time the number of queues grew: the next offset of each queue that there was. A key
    may belong to another queue since."""


MOST_GROWN = 64
"""How often a topic may grow while messages from before its first growth are retained."""


def with_growth(
    topic: str, grown: tuple[tuple[int, ...], ...], ends: tuple[int, ...], starts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """`grown` with one more growth, at these next offsets; those before everything that is retained are forgotten.

    Raises InvalidRequest where a topic would grow for more than the MOST_GROWNth time.
    """
    kept = [at for at in grown if any(start < end for start, end in zip(starts, at, strict=False))]
    if len(kept) >= MOST_GROWN:
        raise InvalidRequest(
            f"topic {topic!r} grew {MOST_GROWN} times while its first messages are retained, and each growth is kept "
            "for the order of its keys: give it more queues at once, or wait until retention has dropped them",
            "too_many_growths",
        )
    # Also where nothing is in its queues yet: a half may be stored already, whose key belongs to another queue now.
    return (*kept, ends)


@dataclass(slots=True)
class Subscription:
    """A group's wishes of a topic. `start` has been resolved to an offset per queue when it was made."""

    group: str
    topic: str
    mode: str = "shared"
    tags: tuple[str, ...] = ()
    max_attempts: int = 16
    retry_min_us: int = 1_000_000
    retry_max_us: int = 300_000_000
    filter: str = ""  # an expression over headers, key and tag; see notify/server/delivery/filter.py
    epoch: int = 0  # rises with each reset: offsets go back only between epochs
    of_topic: str = ""  # of a retry topic: the topic whose messages it holds
    replay: int = 0  # which run of the topic's messages it is for an inbox: a higher one has effects again
    last_replay: int = 0  # the highest number that a reset or redrive of this subscription was given
    inbox_from_us: int = -1  # its consumers' inbox has rows of messages committed from then on; -1: nobody has said


@dataclass(slots=True)
class PriorityClass:
    """Topics that share `weight` parts of a group's deliveries; `topics` are names, or patterns with `*`."""

    name: str
    weight: int
    topics: tuple[str, ...] = ()


@dataclass(slots=True)
class Priorities:
    """How a group's topics share its deliveries. A topic's share is how many turns it has within its class."""

    classes: tuple[PriorityClass, ...] = ()
    shares: dict[str, int] = field(default_factory=dict)


class Progress(Protocol):
    """How far a group has come in one queue: everything below `floor` is settled, and `settled` above it."""

    @property
    def floor(self) -> int: ...

    @property
    def settled(self) -> OffsetRuns: ...

    @property
    def attempts(self) -> dict[int, int]: ...

    @property
    def retry_at(self) -> dict[int, int]: ...

    def is_settled(self, offset: int) -> bool: ...

    def next_unsettled(self, offset: int) -> int: ...


class SettleKind(enum.IntEnum):
    """Why an offset is done with."""

    ACK = 0
    FILTERED = 1
    DEAD_LETTER = 2
    CORRUPT = 3
    EXPIRED = 4
    RESET = 5


@dataclass(frozen=True, slots=True)
class Settlement:
    """A group's settlement of a message."""

    group: str
    kind: SettleKind | None
    """None: an attempt failed, and the message is to be delivered again."""
    at_us: int
    """When it was recorded, by the server's clock."""
    attempts: int = 0
    """Attempts until then, of a failed one."""


class BridgeState(msgspec.Struct):
    """How far a bridge has come with a source: durable together with the messages up to there."""

    source: str
    epoch: int = 0  # of the bridge that writes now; an older one is refused
    position: str = ""  # the bridge's own words, compared as they are; empty: nothing yet
    rows: int = 0  # transactions taken over so far
    updated_us: int = 0
    since: str = ""  # where the source stood before this batch: an audit sees from it that none is missing


class BridgeBatch(msgspec.Struct):
    """A bridge's batch: transactions, and the position behind them."""

    source: str
    epoch: int
    expected_position: str
    position: str
    transactions: Sequence[NewTransaction] = ()
    commit: Sequence[bytes] = ()  # halves of earlier parts, which become visible with this batch
    claim: bool = False  # a bridge begins: its epoch must be above every earlier one


@dataclass(frozen=True, slots=True)
class InDoubt:
    """How many transactions are undecided, and since when the oldest of those that are not parked."""

    prepared: int
    parked: int
    oldest_us: int = 0
    """0: there is none."""
    oldest_group: str = ""
    counted_to: int = 0
    """Where counting stops; 0: it does not."""


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

    def create_topic_soon(self, topic: Topic) -> None:
        """Make or change a topic without waiting; whatever is durable later comes after it."""
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
