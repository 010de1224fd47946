"""The hold of a message's key, and how it begins and ends in a record of attempts."""

from __future__ import annotations

from typing import NamedTuple

HOLD = "hold"
"""The `on_exhausted` with which a message without attempts left holds its key."""
HOLD_RETRIED, HOLD_RELEASED = -1, -2
"""Instead of the time since when a key is held: its hold ended, and the message gets one more attempt, or all its
attempts once more."""


class Hold(NamedTuple):
    """Why no message of a key is delivered until somebody decides."""

    since_us: int
    reason: str
    """How the last attempt failed."""
