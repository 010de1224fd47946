"""Fills a new ledger with what was said before: from findings.jsonl, and from the `state.json` of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from notify.spark.times import instant_text
from notify.spark.watch import looks
from notify.spark.watch.ledger import Ledger, Position
from notify.spark.watch.lines import Line


def take_over(ledger: Ledger, directory: Path, start_us: int) -> Position:
    """Where the watch begins: at `start_us`, or where an earlier version was. Within the ledger's transaction.

    Nothing that findings.jsonl has is said again, also where the ledger was lost.
    """
    state, lines = directory / "state.json", directory / "findings.jsonl"
    saved: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    window = int(saved.get("window", 0))
    size = 0
    if lines.exists():
        with lines.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a kill cut it short: its window is audited again
                size += len(line)
                _take(ledger, line, window)
    ledger.forget()
    next_us = int(saved.get("next_us", start_us))
    looks.begin(ledger, min([each["from_us"] for each in saved.get("waiting", ())], default=next_us))
    full = [int(path.stem.rpartition("-")[2]) for path in directory.glob("findings-[0-9]*.jsonl")]
    number = max(full, default=0) + 1
    return Position(next_us, window, file_number=number, file_offset=size)


def lost_state(begun: Position) -> list[Line]:
    """A line if a watch begins beside the findings of one whose state is gone: what that had not audited is missing."""
    if begun.window or (begun.file_number == 1 and not begun.file_offset):
        return []
    detail = (
        f"the state of the watch before (watch.db) is gone: this one begins at {instant_text(begun.next_us)}, and does "
        "not look at older windows. Audit the time before with notify audit run"
    )
    start = begun.next_us
    return [{"kind": "inconclusive", "window_us": start, "key": f"STATE:{start}", "detail": detail}]


def _take(ledger: Ledger, line: bytes, window: int) -> None:
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:
        return  # a line within which an earlier version was killed
    if said.get("kind") == "finding":
        ledger.know(said["key"], said["window_us"], window)
    elif said.get("kind") == "revision":
        ledger.revise(said["key"])
