"""Transactions and messages as a storage receives, answers and shows them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from notify.errors import NotifyError, Unavailable
from notify.protocol.wire import Payload
from notify.protocol.withdrawal import Dedupe, Wanted
from notify.storage.topics import Flush


class State(enum.IntEnum):
    """The state of a transaction."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


STATE_NAMES = {state: state.name for state in State}
"""The names of the states, for code that runs for each item of a request: `State.name` takes three times as long."""


class Put(enum.IntEnum):
    """The result of storing a transaction."""

    STORED = 0
    ALREADY = 1
    IN_USE = 2


class NewMessage(msgspec.Struct, gc=False):
    """A message as it enters a storage; `payload` is its canonical encoding (notify/protocol/wire.py).

    `content` is the decoded payload if the caller has it at hand. A storage that keeps a message in columns then need
    not decode the payload.
    """

    topic: str
    payload: bytes
    key: str | None = None
    tag: str | None = None
    delay_us: int = 0  # counts from the recorded commit
    deliver_at_us: int = 0
    ttl_us: int = 0  # counts from the time at which the message gets into its queue; the payload has the same value
    content: Payload | None = None
    acts: Wanted | Dedupe | None = None  # the delayed message that this one withdraws, or its dedupe key


class NewTransaction(msgspec.Struct):
    """A half to store, or a transaction that needs no outcome (`committed`)."""

    id: bytes
    producer_group: str
    messages: Sequence[NewMessage]
    source: str = ""
    instance: str = ""
    check_after_us: int = 5_000_000
    committed: bool = False


class PutResult(msgspec.Struct, gc=False):
    put: Put
    state: State
    flush: Flush = Flush.SYNC
    shard: str = ""  # the shard that has the transaction, if the storage consists of several shards


class PartlyStored(Unavailable):
    """Some transactions of a `put` were refused, for a while or because of their content.

    `results` has the error of each refused transaction and the result of each other one.
    """

    def __init__(self, results: Sequence[PutResult | NotifyError]) -> None:
        super().__init__("a part of this could not be stored")
        self.results = results


class Decided(msgspec.Struct, gc=False):
    """The answer to an outcome. `found` is false if the id is not known; `changed` is true if this call decided it."""

    found: bool
    state: State = State.PREPARED
    changed: bool = False
    stale: bool = False  # the token does not belong to the check that is under way
    foreign: bool = False  # the transaction belongs to another producer group


class PartlyDecided(Unavailable):
    """Some outcomes of a `decide` could not be recorded. `results` has their errors, and the results of the others."""

    def __init__(self, results: Sequence[Decided | NotifyError]) -> None:
        reason = next((result for result in results if isinstance(result, NotifyError)), None)
        super().__init__(f"a part of this could not be recorded: {reason}")
        self.results = results


class StoredMessage(msgspec.Struct, gc=False):
    """A message in a queue."""

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
    expires_us: int = 0  # the message is not delivered from this time on; 0: it never expires


@dataclass(slots=True)
class Transaction:
    """A transaction as an administrator sees it."""

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
    shard: str = ""  # the shard that has the transaction, if the storage consists of several shards
    forced: bool = False
    """Whether an administrator decided the transaction; also False if the storage does not know."""
    without_bodies: bool = False
    """Whether the bodies of the messages were left out because they have too many bytes."""

    @property
    def payload_bytes(self) -> int:
        """The number of stored bytes of all messages together."""
        return sum([len(message.payload) for message in self.messages])


@dataclass(frozen=True, slots=True)
class InDoubt:
    """How many transactions are undecided, and how long the oldest one that is not parked has been undecided."""

    prepared: int
    parked: int
    oldest_us: int = 0
    """When the oldest transaction that is not parked was stored; 0: every undecided transaction is parked."""
    oldest_group: str = ""
    counted_to: int = 0
    """The count at which counting stops; 0: everything is counted."""
