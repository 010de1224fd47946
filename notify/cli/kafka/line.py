"""One line of the doctor's: a check, how it went, and what to do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail", "unknown"]
NAMED = 5


@dataclass(frozen=True, slots=True)
class Line:
    """`warn`: something may be lost or stop later. `fail`: it does now. `unknown`: it could not be looked at."""

    check: str
    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level:<7} {self.check}: {self.text}"


def named(names: Collection[str]) -> str:
    """The first names of many."""
    shown = sorted(names)[:NAMED]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(shown) + more
