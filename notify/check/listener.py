"""The types of check-back: the half message that a check is about, the outcome, and the listener that answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from notify.protocol.wire import CheckedMessage


class Outcome(enum.Enum):
    """The answer to a check. COMMIT and ROLLBACK decide the transaction; after UNKNOWN it is checked again."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


class CheckUnavailable(Exception):
    """The check cannot be answered now; it does not count as an attempt. `str()` says why."""


@dataclass(slots=True, frozen=True)
class HalfMessage:
    """An undecided transaction that a server asks about.

    `id`: the transaction id as text; `shard`: the log or database that has the half; `source`: the id of the
    producer's database; `attempt`: the number of this check, from 1; `messages`: topic, body (bytes), key, tag and
    headers of each.
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
    """Answers the checks of the topics in `topics`, instead of the local table.

    `check` runs in a separate thread and may query a database. An exception counts as UNKNOWN, and the check does not
    count as an attempt. While the local transaction is still running, a plain SELECT does not see its rows, and
    ROLLBACK would be wrong: answer UNKNOWN unless the result is final.
    """

    topics: ClassVar[Sequence[str]] = ()

    def check(self, half: HalfMessage) -> Outcome:
        raise TypeError(f"{type(self).__name__} needs a check() method")
