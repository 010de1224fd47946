"""A line of `notify doctor --kafka`: a check, its result, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from notify.runtime.visible import first_of

Level = Literal["ok", "warn", "fail", "unknown"]
NAMED = 5


@dataclass(frozen=True, slots=True)
class Line:
    """The result of a check. `warn`: something may be lost or stop later. `fail`: it is lost or stopped now. `unknown`:
    the check was not possible."""

    check: str
    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level:<7} {self.check}: {self.text}"


def named(names: Collection[str]) -> str:
    """The first of these names, and the number of the others."""
    return first_of(sorted(names), NAMED)


def holds(check: Callable[..., bool], *values: Any) -> bool:
    """Whether a setting's check holds; it does not if the value is not a number, such as that of another kind of
    broker."""
    try:
        return check(*values)
    except ValueError:
        return False
