"""Transactions and messages as they enter a storage, as it answers, and as it shows them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from notify.errors import NotifyError, Unavailable
from notify.storage.topics import Flush
from notify.wire import Payload


class State(enum.IntEnum):
    """Where a transaction stands."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


STATE_NAMES = {state: state.name for state in State}
"""The names of states, for what is done for each item of a request: an enum's own `name` takes three times as long."""


class Put(enum.IntEnum):
    """The result of storing a transaction."""

    STORED = 0
    ALREADY = 1
    IN_USE = 2


class NewMessage(msgspec.Struct, gc=False):
    """A message as it enters a storage; `payload` is its canonical encoding (notify/wire.py).

    `content` is the same decoded, where the sender of the message has it at hand: a storage that keeps a message in
    columns need not decode the payload then.
    """

    topic: str
    payload: bytes
    key: str | None = None
    tag: str | None = None
    delay_us: int = 0  # counts from the recorded commit
    deliver_at_us: int = 0
    ttl_us: int = 0  # counts from when it is in its queue; the payload says the same
    content: Payload | None = None


class NewTransaction(msgspec.Struct):
    """A half to store, or with `committed` a transaction that needs no outcome."""

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


class PartlyDecided(Unavailable):
    """Some outcomes of a `decide` could not be recorded; the others have their results."""

    def __init__(self, results: Sequence[Decided | NotifyError]) -> None:
        reason = next((result for result in results if isinstance(result, NotifyError)), None)
        super().__init__(f"a part of this could not be recorded: {reason}")
        self.results = results


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
    without_bodies: bool = False
    """The bodies of its messages were left out, since there are too many bytes of them."""

    @property
    def payload_bytes(self) -> int:
        """How many bytes its messages have together, as they are stored."""
        return sum([len(m.payload) for m in self.messages])


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
