"""Slots: ids by the time that they hold. A slot's ids share their first 8 characters, which is 65.536 seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SLOT_US = 1000 << 16
SLOT_SECONDS = SLOT_US / 1e6
SLOT_BYTES, SLOT_CHARACTERS = 4, 8
_SLOT = re.compile(f"0[0-9a-f]{{{SLOT_CHARACTERS - 1}}}")
LAST_SLOT = 0x0FFFFFFF
"""The slot of ids of the year 2527."""


def slot_at(us: int) -> int:
    """The slot of ids made at an instant, in microseconds since 1970."""
    return us // SLOT_US


def slot_of(characters: str) -> int | None:
    """The slot of ids that begin like this; None if no id begins so."""
    return int(characters, 16) if _SLOT.fullmatch(characters) else None


@dataclass(frozen=True)
class SlotRange:
    """Slots [first, end)."""

    first: int
    end: int

    @property
    def start_us(self) -> int:
        return self.first * SLOT_US

    @property
    def end_us(self) -> int:
        return self.end * SLOT_US


def ranges_of(slots: Iterable[int], most: int) -> list[SlotRange]:
    """The ranges that slots form, in order; if there are more than `most`, those with the smallest gaps are joined."""
    starts = sorted(set(slots))
    if not starts:
        return []
    gaps = sorted(range(1, len(starts)), key=lambda i: starts[i] - starts[i - 1], reverse=True)
    cuts = sorted(i for i in gaps[: most - 1] if starts[i] - starts[i - 1] > 1)
    firsts = [0, *cuts]
    return [SlotRange(starts[a], starts[b - 1] + 1) for a, b in zip(firsts, [*cuts, len(starts)], strict=True)]
