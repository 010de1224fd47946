"""The end of a process's life: the conductor kills it, or it kills itself at the worst moment.

A producer kills itself with SIGKILL between half and COMMIT, or between COMMIT and outcome. Before that it writes the
transaction into a file, so that the conductor knows which transaction lost its outcome.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.testing.crashes import crashing

POINTS = {"after_half": "between half and COMMIT", "after_local_commit": "between COMMIT and outcome"}
"""A description of each crash point of the client."""


@dataclass(frozen=True, slots=True)
class End:
    """When a life ends: after `progress` orders or effects of the process, and `seconds` after the first of them.

    `point`: one of POINTS, at which the process then kills itself; empty: the conductor kills it, at any moment.
    """

    point: str
    progress: int
    seconds: float


@dataclass(slots=True)
class Lost:
    """A transaction whose process died before it sent the outcome.

    `point`: a description from POINTS. `state`: the final state. `checks`: the servers' record of the checks of the
    transaction and their answers.
    """

    transaction: str
    process: str
    point: str
    state: str = ""
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class SelfKill:
    """Kills the process that uses it, a producer, at the point of an End."""

    def __init__(self, end: End, process: str, notes: Path) -> None:
        """`process`: the name of this process. `notes`: the file of transactions that lost their outcome."""
        self._end = end
        self._process = process
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._orders = 0
        self._first_at = 0.0
        self._armed = False

    def committed(self) -> None:
        """Count a committed order. May be called from any thread."""
        with self._lock:
            self._orders += 1
            self._first_at = self._first_at or time.monotonic()
            lived = time.monotonic() - self._first_at
            if not self._armed and self._orders >= self._end.progress and lived >= self._end.seconds:
                self._armed = True
                self._stack.enter_context(crashing(self._end.point, self._die))

    def _die(self, transaction_id: str) -> None:
        lost = {"transaction": transaction_id, "process": self._process, "point": POINTS[self._end.point]}
        os.write(self._notes, json.dumps(lost).encode() + b"\n")
        os.kill(os.getpid(), signal.SIGKILL)


def read_lost(notes: Path) -> list[Lost]:
    """Every transaction in the file, without a line that is still being written."""
    if not notes.exists():
        return []
    whole, _, _ = notes.read_text().rpartition("\n")
    return [Lost(**json.loads(line)) for line in whole.splitlines()]
