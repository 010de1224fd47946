"""Long positions of sources: a target stores a base rarely, and with each batch only the difference from it.

The position of a MySQL has all intervals of its GTIDs, and may take a megabyte. A target stores two positions with each
batch, the new one and the one before: 40 MB/s at twenty batches per second. But only one or two intervals change with a
batch. So positions of more than LONG characters are stored as a JSON object with a digest of the base, and with each
part between two commas that differs from the base's.
"""

from __future__ import annotations

import hashlib
import json

from notify.errors import InvalidRequest
from notify.protocol.limits import BASE_CHARACTERS

LONG = 4096
"""Positions of fewer characters are stored as they are."""
MOST_CHANGED = 16 << 10
"""The most characters of a difference; beyond that the position becomes the base."""
_MARK = '{"base": "'


class LongPosition:
    """A position of a source: as a whole, and as a target stores it."""

    def __init__(self, stored: str = "", base: str = "") -> None:
        """A position as a target has it. Raises InvalidRequest if it refers to another base."""
        self.stored = stored
        self._base = base
        self._parts = base.split(",")
        self._digest = _digest(base)
        self.whole = stored if not refers_to_base(stored) else self._restored()

    @classmethod
    def becoming_base(cls, position: str) -> LongPosition:
        """A position that is the base itself. Raises InvalidRequest if it exceeds the bound."""
        if len(position) > BASE_CHARACTERS:
            raise InvalidRequest(
                f"the source's position has {len(position):,} characters, but a position has at most "
                f"{BASE_CHARACTERS:,}: its GTIDs have too many gaps. Fill the gaps with empty transactions, or RESET "
                "BINARY LOGS AND GTIDS on the source while nothing is written; then start this bridge with --backfill",
                "out_of_bounds",
            )
        made = cls("", position)
        made.stored, made.whole = made._text([]), position
        return made

    def moved(self, position: str) -> LongPosition | None:
        """Another position with the same base; None if it has to become the base."""
        if position == self.whole:
            return self
        if len(position) <= LONG:
            stored: str | None = position
        else:
            stored = self._shortened(position)
        if stored is None:
            return None
        made = LongPosition.__new__(LongPosition)
        made.stored, made.whole = stored, position
        made._base, made._parts, made._digest = self._base, self._parts, self._digest
        return made

    def _shortened(self, position: str) -> str | None:
        parts = position.split(",")
        if not self._base or len(parts) != len(self._parts):
            return None
        changed: list[tuple[int, int, int, str]] = []
        size = 0
        for number, (before, after) in enumerate(zip(self._parts, parts, strict=True)):
            if before != after:
                head = _common(before, after)
                tail = _common(before[head:][::-1], after[head:][::-1])
                changed.append((number, head, tail, after[head : len(after) - tail]))
                size += 32 + len(changed[-1][3])
                if size > MOST_CHANGED:
                    return None
        return self._text(changed)

    def _text(self, changed: list[tuple[int, int, int, str]]) -> str:
        return json.dumps({"base": self._digest, "changed": changed})

    def _restored(self) -> str:
        stored = json.loads(self.stored)
        if stored["base"] != self._digest:
            raise InvalidRequest(
                "the target's position of this source refers to a base that the target does not have: it was changed "
                "by hand; start this bridge with --backfill"
            )
        parts = list(self._parts)
        for number, head, tail, text in stored["changed"]:
            before = parts[number]
            parts[number] = before[:head] + text + before[len(before) - tail :]
        return ",".join(parts)


def refers_to_base(stored: str) -> bool:
    """Whether a stored position is a difference from a base."""
    return stored.startswith(_MARK)


def _digest(base: str) -> str:
    return hashlib.sha256(base.encode()).hexdigest()[:32]


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common from the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
