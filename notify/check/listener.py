"""The answers to checks: the question, the answer, and the listener that a service may write itself."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from notify.wire import CheckedMessage


class Outcome(enum.Enum):
    """The outcome of a transaction. Only COMMIT and ROLLBACK resolve; UNKNOWN is asked again."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


class CheckUnavailable(Exception):
    """The answer cannot be known now: no check is used up. `str()` says why."""


@dataclass(slots=True, frozen=True)
class HalfMessage:
    """An undecided transaction that a server asks about.

    `id`: transaction id as text; `shard`: the server's log that asks; `source`: the database that the half names;
    `attempt`: which check this is, from 1; `messages`: topic, body (bytes), key, tag and headers of each.
    """

    id: str
    producer_group: str
    shard: str
    source: str
    attempt: int
    messages: Sequence[CheckedMessage]

    @property
    def topic(self) -> str:
        return self.messages[0].topic if self.messages else ""


class CheckMessageListener:
    """Answers checks for the topics it names, instead of the local table.

    `check` runs in a thread of its own and may look into a database; what it raises counts as UNKNOWN and uses up no
    check. Beware of the trap: while the local transaction is still in flight, a plain SELECT sees nothing, and
    ROLLBACK would then be wrong. Answer UNKNOWN unless what you see is final.
    """

    topics: ClassVar[Sequence[str]] = ()

    def check(self, half: HalfMessage) -> Outcome:
        raise TypeError(f"{type(self).__name__} needs a check() method")
