"""Named points of the program at which a test can have the process killed, as if it had crashed.

`NOTIFY_CRASH_AT=half.after_sync:3` kills this process with SIGKILL the third time it reaches that point. By default no
point is armed, and a point costs one comparison.
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
    "dead_letter.before_sync",
    "dead_letter.after_sync",
    "bridge.before_sync",
    "bridge.after_sync",
    "bridge.after_append",
    "seal.before_rename",
    "checkpoint.before_rename",
    "carry.before_sync",
    "carry.after_sync",
    "retention.before_unlink",
)

SCHEDULE_POINTS = ("schedule.before_mark",)
"""The point between the message of an instant and the mark that the instant is done."""

WATCH_POINTS = (
    "watch.at_start",
    "watch.before_audit",
    "watch.after_audit",
    "watch.before_commit",
    "watch.in_commit",
    "watch.after_commit",
    "watch.before_look",
    "watch.in_look",
    "watch.before_line_sync",
    "watch.after_line_sync",
    "watch.after_line_note",
    "watch.before_rename",
    "watch.after_rename",
    "watch.before_alarm",
    "watch.after_alarm",
    "watch.after_alarm_note",
)
"""Points of a continuous audit; no server reaches them."""

COPY_POINTS = ("copy.before_facts", "copy.forgetting")
"""Points of an audit that copies segments of the log, or removes copies."""

SHIP_POINTS = ("ship.before_log", "ship.after_log", "ship.before_manifest", "ship.after_manifest", "ship.after_page")
"""Points of the process that ships segments to a store."""

KEEP_POINTS = ("keep.before_manifest", "keep.before_files")
"""Points at which that process drops old segments from the store."""

_armed = ""
_left = 0


def arm(specification: str) -> None:
    """Arm the point `name:count`; an empty text disarms. Raises ValueError for an unknown point."""
    global _armed, _left
    name, _, count = specification.partition(":")
    if name and name not in POINTS + WATCH_POINTS + COPY_POINTS + SHIP_POINTS + KEEP_POINTS + SCHEDULE_POINTS:
        raise ValueError(f"there is no crash point {name!r}; there are {', '.join(POINTS)}")
    _armed, _left = name, int(count or 1)


def reached(name: str) -> None:
    """Kill this process if the point is armed and was reached as often as it was armed for."""
    global _left
    if name == _armed:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("NOTIFY_CRASH_AT", ""))
