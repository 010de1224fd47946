"""Failure groups of dead letters over Kafka: each letter is read once, some at a time, and counted from then on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from notify.message import DEAD_LETTER_REASON
from notify.server.groups.kafka.letters import Letter
from notify.server.groups.own_letters import failure_row
from notify.server.jobs.failures import Failures

LOOKED_AT = 2_000
"""Letters that are read at one look; the next look goes on from there."""
MOST_LETTERS = 100_000
"""Letters of a group that are counted, the oldest first: of each that waits its place is kept."""
MOST_GROUPS = 100
"""Groups that are kept; the one that was asked for longest ago leaves."""

Bounds = Mapping[int, tuple[int, int]]
"""The first offset of each partition of letters, and the one behind its last."""


@dataclass(slots=True)
class _Seen:
    """The letters of one group before the number `next`."""

    starts: Mapping[int, int]
    next: int = 0
    looked_at: int = 0
    failures: Failures = field(default_factory=Failures)
    waiting: list[tuple[Letter, str]] = field(default_factory=list)
    """Letters without their content that nobody has sent again or dropped, each with its reason."""


class LetterFailures:
    """One thread at a time."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def look(
        self,
        group: str,
        bounds: Bounds,
        read: Callable[[int], Iterator[Letter]],
        is_closed: Callable[[Letter], bool],
    ) -> dict[str, Any]:
        """The failure groups as the admin route shows them, with the next letters counted.

        `read` gives the letters from a number on; `is_closed` says whether one was sent again or dropped.
        """
        seen = self._of(group, {partition: start for partition, (start, _) in bounds.items()})
        self._close(seen, is_closed)
        most = min(LOOKED_AT, MOST_LETTERS - seen.looked_at)
        came = 0
        for letter in itertools.islice(read(seen.next), max(0, most)):
            came += 1
            self._count(seen, letter, is_closed(letter))
        total = sum(max(0, end - start) for start, end in bounds.values())
        is_all = came < most  # offsets count the records of transactions, too
        return {
            "failures": [failure_row(failure) for failure in seen.failures.listed()],
            "others": seen.failures.others,
            "looked_at": seen.looked_at,
            "of": seen.looked_at if is_all else max(total, seen.looked_at),
        }

    def _of(self, group: str, starts: Mapping[int, int]) -> _Seen:
        """The figures of a group; new ones where letters were purged, or partitions added, since."""
        seen = self._seen.pop(group, None)
        if seen is None or seen.starts != starts:
            seen = _Seen(starts)
        self._seen[group] = seen
        if len(self._seen) > MOST_GROUPS:
            del self._seen[next(iter(self._seen))]
        return seen

    def _close(self, seen: _Seen, is_closed: Callable[[Letter], bool]) -> None:
        waiting = []
        for letter, reason in seen.waiting:
            if is_closed(letter):
                seen.failures.closed(reason)
            else:
                waiting.append((letter, reason))
        seen.waiting = waiting

    def _count(self, seen: _Seen, letter: Letter, is_closed: bool) -> None:
        payload = letter.payload()
        reason = (payload.headers or {}).get(DEAD_LETTER_REASON, "")
        seen.failures.note(reason, letter.id, payload.topic, letter.dead_us, is_closed=is_closed, may_grow=True)
        seen.next, seen.looked_at = letter.number + 1, seen.looked_at + 1
        if not is_closed:
            seen.waiting.append((letter.place_alone(), reason))
