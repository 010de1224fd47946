"""Whether a group with undelivered messages stands still, is behind, or left single messages out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from notify.spark.causes.settled import LastSettled, Settled
from notify.spark.causes.subjects import Subject
from notify.spark.result import Found

STILL, BEHIND, LEFT_OUT = "still", "behind", "left out"
"""States of a subject of UNDELIVERED: it settles nothing; it settles, and not these yet; it settled later ones."""


@dataclass(frozen=True)
class Standstill:
    """The last settlements of groups. Instants are in microseconds since 1970."""

    last: LastSettled
    still_before_us: int
    """A group whose last settlement is older stands still."""

    def with_state(self, subject: Subject, case: Found) -> Subject:
        """The subject of an undelivered message with its state; another one as it is."""
        if subject.finding != "UNDELIVERED":
            return subject
        settled = self._in_queue(subject.name, case)
        if settled.at_us < self.still_before_us:
            return replace(subject, state=STILL)
        is_passed = settled.queued_us > case.evidence.get("queued_us", case.at_us)
        return replace(subject, state=LEFT_OUT if is_passed else BEHIND)

    def last_us(self, group: str, cases: Iterable[Found]) -> int:
        """The last settlement of a group in the queues of these cases; 0: none since the first of them."""
        return max((self._in_queue(group, case).at_us for case in cases), default=0)

    def is_still(self, group: str) -> bool:
        """Whether the group settles nothing in any queue."""
        return all(s.at_us < self.still_before_us for key, s in self.last.items() if key[0] == group)

    def _in_queue(self, group: str, case: Found) -> Settled:
        own = self.last.get((group, case.topic, -1 if case.queue is None else case.queue), Settled())
        return own.newest(self.last.get((group, "", -1), Settled()))
