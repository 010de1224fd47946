"""Named places where a test may have the process killed, as a crash would.

`NOTIFY_CRASH_AT=half.after_sync:3` kills this process with SIGKILL the third time that point is reached. Nothing is
armed by default, and then a point costs one comparison.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "half.before_sync",
    "half.after_sync",
    "half.before_answer",
    "outcome.before_sync",
    "outcome.after_sync",
    "dead_letter.between",
    "seal.before_rename",
    "checkpoint.before_rename",
    "retention.before_unlink",
    "carry.before_sync",
    "client.after_half",
    "client.after_commit",
    "client.before_outcome",
)

_armed, _, _count = os.environ.get("NOTIFY_CRASH_AT", "").partition(":")
_left = int(_count or 1)


def reached(name: str) -> None:
    """Die here if this point is armed and its turn has come."""
    global _left
    if name == _armed:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
