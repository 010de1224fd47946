"""Delayed messages and withdrawals of them, as a storage shows both."""

from __future__ import annotations

import enum

import msgspec

from notify.protocol.withdrawal import Fate, Wanted

WAIT_US = 24 * 3600 * 1_000_000
"""How long a withdrawal waits for an unknown message: a relay may bring them in another order."""
MOST_WAITING = 20_000
"""The most withdrawals that wait for their messages; a further one is NOT_FOUND immediately."""
MOST_UNKNOWN = 10_000
"""If this many wait, a withdrawal of an unknown message is NOT_FOUND immediately, so that there is room for those of
undecided messages: any sender may name messages that never come."""

MOST_PENDING = 100_000
"""The most dedupe keys with a pending message; messages with further ones are refused for now."""


class Standing(enum.StrEnum):
    """The state of a message that is to be withdrawn."""

    UNDECIDED = "undecided"
    DELAYED = "delayed"
    RELEASED = "released"
    WITHDRAWN = "withdrawn"
    ROLLED_BACK = "rolled back"
    COLLAPSED = "collapsed"


class Withdrawable(msgspec.Struct, gc=False):
    """A message that is to be withdrawn. `due_us` is 0 unless it is delayed, or was until it was withdrawn."""

    topic: str
    standing: Standing
    due_us: int = 0
    at_us: int = 0  # when it was withdrawn; 0: it was not


class Withdrawal(msgspec.Struct, gc=False):
    """A withdrawal that a storage has. `fate` is None while its own transaction is undecided, or if it is rolled back
    (`rolled_back`)."""

    topic: str
    wanted: Wanted
    fate: Fate | None
    rolled_back: bool = False
    at_us: int = 0


def is_in_time(since_us: int, now_us: int) -> bool:
    """Whether a withdrawal that waits since an instant, or without limit (0), may still wait."""
    return not since_us or now_us <= since_us + WAIT_US
