"""The transactions role of a storage, and the rules of both roles.

Every storage (the embedded log, memory) passes the one suite in tests/contract. Rules that hold for all of them:

* a method that changes something returns only once the change is durable; its results stand in request order;
* times are integers, microseconds since 1970, and are given by the caller. The instants that only a storage knows
  (when a frame was written, or a settlement came) are of the clock that it is constructed with;
* ids are 16 bytes; a message is (transaction id, number);
* outcomes compare and set: the first one recorded stays.

The queues role is in queues.py, further capabilities in capabilities.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.groups import Subscription
from notify.storage.records import Decided, InDoubt, NewTransaction, PutResult, State, Transaction
from notify.storage.topics import Topic
from notify.wire import Payload, decode_payload, encode_msgpack

NO_TOKENS: Mapping[bytes, int] = {}
NO_SHARDS: Mapping[bytes, str] = {}

COUNTED_TO = 1000


class TopicStore(Protocol):
    """The topics that there are to send to."""

    def topics(self) -> list[Topic]: ...

    def topic(self, name: str) -> Topic | None: ...

    def has_topic(self, name: str) -> bool: ...

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        """Make or change a topic without waiting; whatever is durable later comes after it.

        `followed_by`: subscriptions to a topic that is new, from its first message on. They are made with the topic or
        not at all, also where the server ends meanwhile; a storage without queues has none.
        """
        ...


class CheckStore(Protocol):
    """The schedule of checks, and their answers."""

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

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        """The messages of undecided transactions, empty where one is not known any more."""
        ...

    def next_check_us(self, producer_group: str) -> int | None:
        """When the group's next check may be due (it may be early, never late); None if nothing is open."""
        ...


class TransactionStore(TopicStore, CheckStore, Protocol):
    """Halves and outcomes."""

    async def open(self, now_us: int) -> None:
        """Recover and be ready; raises StorageFailed or Corrupt with what to do."""
        ...

    async def close(self) -> None:
        """Make everything durable, then let go of files and threads."""
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
        `shards` says where transactions are, as far as the caller knows. Raises PartlyDecided with the results where
        one of several shards is away.
        """
        ...

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        """The state of each transaction, None where the id is not known."""
        ...

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        """The producer group of each transaction, None where the id is not known, or belongs to none."""
        ...

    async def transaction(self, transaction_id: bytes) -> Transaction | None: ...

    async def undecided(
        self,
        state: State | None,
        producer_group: str | None,
        older_than_us: int | None,
        limit: int,
        most_bytes: int | None = None,
    ) -> list[Transaction]:
        """PREPARED and PARKED transactions, the oldest first.

        `most_bytes`: the first ones have so many bytes of messages together, or are one; the others have no bodies.
        """
        ...

    async def in_doubt(self) -> InDoubt:
        """How many transactions are undecided; asked every few seconds."""
        ...


def without_bodies_beyond(transactions: Iterable[Transaction], most_bytes: int | None) -> list[Transaction]:
    """Transactions, of which those behind so many bytes of messages have no bodies; the first one has its own."""
    kept: list[Transaction] = []
    size = 0
    for t in transactions:
        size += t.payload_bytes
        if most_bytes is not None and size > most_bytes and kept:
            bare = [structs.replace(m, payload=_without_body(m.payload)) for m in t.messages]
            t = replace(t, messages=bare, without_bodies=True)
        kept.append(t)
    return kept


def _without_body(payload: bytes) -> bytes:
    return encode_msgpack(structs.replace(decode_payload(payload), body=b"")) if payload else payload
