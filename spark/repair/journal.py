"""The journal of a plan that is carried out: what was begun and what came of it, one JSON line each, beside the plan.

A line is durable before what it announces is done. A repair that was killed goes on from here.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from notify.errors import Conflict

DONE = (200, 201)
"""The statuses of an item that is not carried out again."""


class Journal:
    """Open it with `with`: one process at a time has it. `done`: the results by item, of what needs no repetition."""

    def __init__(self, plan: Path) -> None:
        self._path = plan.with_name(plan.name + ".journal")
        self.done: dict[str, dict[str, Any]] = {}
        self.begun: set[str] = set()
        """Items that were begun, and of which no result is known."""

    def __enter__(self) -> Journal:
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise Conflict(f"another process carries out this plan: it holds {self._path}", "repair_runs") from None
        self._file.seek(0)
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        self._file.truncate(end)  # a line that a kill cut short announced nothing
        for line in data[:end].splitlines():
            self._take(json.loads(line))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def _take(self, line: dict[str, Any]) -> None:
        if line["state"] == "begun":
            self.begun.add(line["key"])
        else:
            self.begun.discard(line["key"])
            if line["status"] in DONE:
                self.done[line["key"]] = line

    def begin(self, keys: Iterable[str]) -> None:
        self._write([{"key": key, "state": "begun"} for key in keys])

    def note(self, lines: Iterable[dict[str, Any]]) -> None:
        """Note results: key, status, detail."""
        self._write([{**line, "state": "ended"} for line in lines])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        for line in lines:
            self._take(line)
