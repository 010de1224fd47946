"""The journal of a plan, in the plan's directory: what was begun, and each result, one JSON line each.

The first line says which plan it is of: items have the same keys in every plan.
A line is durable before its action. A repair that was killed continues from here.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from notify.errors import Conflict


def journal_of(plan: Path) -> Path:
    """The file of a plan's journal."""
    return plan.with_name(plan.name + ".journal")


def lines_of(plan: Path) -> Iterator[dict[str, Any]]:
    """The lines of a plan's items, without an incomplete last line; none if there is no journal."""
    path = journal_of(plan)
    if path.exists():
        yield from _lines_in(path)


def _lines_in(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        if (known := json.loads(line))["state"] != OF_PLAN:
            yield known


def done_in(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The items that a journal says were done: the line of the result of each, with who did it and why."""
    begun: dict[str, dict[str, Any]] = {}
    done: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["state"] == "begun":
            begun[line["key"]] = line
        elif line["status"] in DONE:
            done[line["key"]] = begun.get(line["key"], {}) | line
    return done


def done_beside(plan: Path) -> dict[str, dict[str, Any]]:
    """The items that all journals in a plan's directory say were done, as `done_in`. Other files are left out."""
    done: dict[str, dict[str, Any]] = {}
    for path in sorted(plan.parent.glob("*.journal")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            done |= done_in(_lines_in(path))
    return done


OF_PLAN = "plan"
"""The state in the first line."""
DONE = (200, 201)
"""The statuses of an item that is not carried out again."""


class Journal:
    """A context manager for one process at a time. `done`: the items that were done when it was opened."""

    def __init__(self, plan: Path, made_at: str = "", who: str = "", reason: str = "") -> None:
        """`made_at`: when the plan was made. `who` carries it out, and `reason` why: that is noted with each item."""
        self._path = journal_of(plan)
        self._made_at = made_at
        self._why = {"who": who, "reason": reason}
        self.done: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Journal:
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise Conflict(f"another process carries out this plan: it holds {self._path}", "repair_runs") from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def _read(self) -> None:
        """Read the existing journal. Raises Conflict if it belongs to another plan."""
        self._file.seek(0)
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        self._file.truncate(end)  # a line that a kill cut short announced no action
        lines = [json.loads(line) for line in data[:end].splitlines()]
        if not lines:
            self._write([{"state": OF_PLAN, "made_at": self._made_at}])
        elif lines[0]["state"] == OF_PLAN and lines[0]["made_at"] != self._made_at:
            raise Conflict(
                f"{self._path} is the journal of another plan, made at {lines[0]['made_at']}: move it away, or name "
                "this plan otherwise",
                "other_plan",
            )
        self.done = done_in(line for line in lines if line["state"] != OF_PLAN)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def begin(self, keys: Iterable[str]) -> None:
        at_us = time.time_ns() // 1000
        self._write([{"key": key, "state": "begun", "at_us": at_us, **self._why} for key in keys])

    def note(self, lines: Iterable[dict[str, Any]]) -> None:
        """Note results: key, status, detail."""
        at_us = time.time_ns() // 1000
        self._write([{**line, "state": "ended", "at_us": at_us} for line in lines])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())
