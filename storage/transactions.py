"""The transactions role of a storage, and the rules of both roles.

Every storage passes the suite in tests/contract. These rules hold for all storages:

* a method that changes something returns only once the change is durable; its results are in the order of the request;
* times are integers, microseconds since 1970, and the caller passes them. A storage takes the times that only it knows
  (when a frame was written, when a settlement was recorded) from the clock that it is constructed with;
* ids are 16 bytes; a transaction id and a number identify a message;
* outcomes compare and set: the first recorded outcome stays.

The queues role is in queues.py. Further capabilities are in capabilities.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from notify.protocol.wire import Payload, decode_payload, encode_msgpack
from notify.storage.checks import CheckAnswer, Checking, Due
from notify.storage.groups import Subscription
from notify.storage.records import Decided, InDoubt, NewTransaction, PutResult, State, Transaction
from notify.storage.topics import Topic

NO_TOKENS: Mapping[bytes, int] = {}
NO_SHARDS: Mapping[bytes, str] = {}

COUNTED_TO = 1000


class TopicStore(Protocol):
    """The topics to which producers can send."""

    def topics(self) -> list[Topic]: ...

    def topic(self, name: str) -> Topic | None: ...

    def has_topic(self, name: str) -> bool: ...

    def create_topic_soon(self, topic: Topic, followed_by: Sequence[Subscription] = ()) -> None:
        """Make or change a topic without waiting until it is durable. Changes made after it become durable after it.

        `followed_by`: subscriptions to make together with a new topic, from its first message on. Either the topic and
        all of them are made or nothing is, even if the server ends meanwhile. A storage without queues takes none.
        """
        ...


class CheckStore(Protocol):
    """The schedule of checks, and their answers."""

    async def claim_checks(self, producer_group: str, now_us: int, limit: int, answer_within_us: int) -> list[Due]:
        """Claim at most `limit` due checks. Each gets a fresh token and is due again after `answer_within_us`."""
        ...

    async def release_checks(self, claimed: Sequence[Due], due_us: int) -> None:
        """Return claimed checks that no poller could be asked to answer. They are due again at `due_us`."""
        ...

    async def answer_check(self, answer: CheckAnswer) -> bool:
        """Record an answer that does not decide the transaction. Returns False if its token is not the current one."""
        ...

    async def checking(self, transaction_id: bytes, shard: str | None = None) -> Checking | None:
        """The state of an undecided transaction's checks; None if the transaction is decided or not known."""
        ...

    async def resume_checks(self, transaction_id: bytes, now_us: int, *, reset: bool) -> bool:
        """Make a check of a transaction due now. Returns False if the transaction is not undecided.

        `reset`: the transaction becomes PREPARED again and its answered checks are forgotten.
        """
        ...

    async def half_contents(self, claimed: Sequence[Due]) -> list[list[Payload]]:
        """The messages of each claimed transaction; an empty list if the transaction is not known any more."""
        ...

    def next_check_us(self, producer_group: str) -> int | None:
        """When the group's next check is due, or an earlier time; None if the group has no undecided transaction."""
        ...


class TransactionStore(TopicStore, CheckStore, Protocol):
    """Halves and outcomes."""

    async def open(self, now_us: int) -> None:
        """Recover what is stored. Raises StorageFailed or Corrupt; the error says what to do."""
        ...

    async def close(self) -> None:
        """Make everything durable, then close files and end threads."""
        ...

    async def put(self, transactions: Sequence[NewTransaction], now_us: int) -> list[PutResult]:
        """Store halves, and committed transactions.

        An id that is stored already gives ALREADY if the group and the content are the same, and IN_USE if not.
        Returns when the strictest `flush` of the named topics is reached for all transactions.

        Raises DiskFull before anything changed. Raises PartlyStored, with the results, if one of several shards cannot
        be reached or a transaction has a value that a database cannot hold.
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

        `tokens` has the token of each check that an outcome answers. The result is `stale` if another check, or no
        check, of the transaction is under way. It is `foreign` if the transaction belongs to another producer group,
        whether it is decided or not.
        `shards` says which shard has a transaction, if the caller knows it. Raises PartlyDecided, with the results, if
        one of several shards cannot be reached.
        """
        ...

    async def states(self, ids: Sequence[bytes]) -> list[State | None]:
        """The state of each transaction; None if the id is not known."""
        ...

    async def producer_groups(self, ids: Sequence[bytes]) -> list[str | None]:
        """The producer group of each transaction; None if the id is not known or the transaction has no group."""
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

        `most_bytes`: how many bytes the messages may have together. Transactions beyond them are listed without the
        bodies of their messages; the first transaction always has its bodies.
        """
        ...

    async def in_doubt(self) -> InDoubt:
        """How many transactions are undecided; called every few seconds."""
        ...


def without_bodies_beyond(transactions: Iterable[Transaction], most_bytes: int | None) -> list[Transaction]:
    """The transactions, without the bodies of those beyond the first `most_bytes`; the first one keeps its bodies."""
    bounded: list[Transaction] = []
    size = 0
    for transaction in transactions:
        size += transaction.payload_bytes
        if most_bytes is not None and size > most_bytes and bounded:
            bare = [structs.replace(m, payload=_without_body(m.payload)) for m in transaction.messages]
            bounded.append(replace(transaction, messages=bare, without_bodies=True))
        else:
            bounded.append(transaction)
    return bounded


def _without_body(payload: bytes) -> bytes:
    return encode_msgpack(structs.replace(decode_payload(payload), body=b"")) if payload else payload
