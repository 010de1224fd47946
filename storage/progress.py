"""A group's progress in one queue: a floor, the settled offsets above it, and the attempts at other offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from notify.storage.holds import HOLD_RELEASED, Hold
from notify.storage.runs import OffsetRuns


class QueueProgress:
    """Every offset below `floor` is settled, and every offset in `settled`."""

    __slots__ = ("attempts", "deaths", "floor", "forgiven", "held", "interruptions", "retry_at", "settled")

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.settled = OffsetRuns()
        self.attempts: dict[int, int] = {}
        """How many attempts at an offset ended without settling it, deaths included."""
        self.deaths: dict[int, int] = {}
        """How many of the attempts ended because the lease ran out; an offset without deaths is not here."""
        self.interruptions: dict[int, int] = {}
        """How often an offset was held by a consumer that was told to stop, which counted no attempt."""
        self.retry_at: dict[int, int] = {}
        """When an offset is due for its next attempt; an offset that is due immediately is not here."""
        self.held: dict[int, Hold] = {}
        """The offsets whose key is held, with the reason."""
        self.forgiven: dict[int, tuple[int, int]] = {}
        """Attempts, and deaths among them, that no longer count, because somebody released the key since."""

    def again(self, offsets: Iterable[Sequence[int]], reasons: Sequence[str] = ()) -> None:
        """Record attempts; see `ProgressStore.attempted` and `hold`. Values that are left out at the end are 0."""
        reason = iter(reasons)
        for offset, attempts, *rest in offsets:
            due_us, deaths, interruptions, held_us = (*rest, 0, 0, 0, 0)[:4]
            if held_us > 0:
                self.held[offset] = Hold(held_us, next(reason, ""))
            elif self.held:
                self.held.pop(offset, None)
            if held_us == HOLD_RELEASED:
                self.forgiven[offset] = attempts, deaths
            self.attempts[offset] = attempts
            _set(self.retry_at, offset, due_us)
            _set(self.deaths, offset, deaths)
            _set(self.interruptions, offset, interruptions)

    def settle(self, first: int, count: int) -> None:
        """Mark `count` offsets from `first` on as settled. Some of them may be settled already."""
        last = first + count
        if self.attempts:
            offsets = range(first, last)
            # Iterate over the smaller of the two, and look its offsets up in the larger one.
            candidates = offsets if count <= len(self.attempts) else [o for o in self.attempts if o in offsets]
            for offset in candidates:
                if self.attempts.pop(offset, None) is not None:
                    for values in (self.retry_at, self.deaths, self.interruptions, self.held, self.forgiven):
                        values.pop(offset, None)
        if first <= self.floor:
            if last <= self.floor:
                return
            self.floor = self.settled.absorb(last) if self.settled.offsets else last
        else:
            self.settled.add(first, count)

    def is_settled(self, offset: int) -> bool:
        return offset < self.floor or offset in self.settled

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs (first, count) of [first, end) that are not settled."""
        return self.settled.missing(max(first, self.floor), end)

    def next_unsettled(self, offset: int) -> int:
        """The first offset from `offset` on that is not settled."""
        offset = max(offset, self.floor)
        return self.settled.first_missing(offset) if self.settled.offsets else offset


def _set(values: dict[int, int], offset: int, value: int) -> None:
    """Keep a value, unless it is 0."""
    if value:
        values[offset] = value
    else:
        values.pop(offset, None)


def to_runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending offsets as runs (first, count)."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for offset in offsets:
        if count and offset == first + count:
            count += 1
        else:
            if count:
                runs.append((first, count))
            first, count = offset, 1
    if count:
        runs.append((first, count))
    return runs
