"""Which dead letters a job, or a person, wants to send again or drop; and who does it for a queue engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from notify.filter import Filter
from notify.message import DEAD_LETTER_REASON
from notify.server.jobs.failures import kind_of
from notify.storage.records import StoredMessage
from notify.wire import Payload, decode_payload, microseconds

LOOKED_AT_ONCE = 500
"""Dead letters that are looked at in one go: a search through all must not hold up everyone else."""


@dataclass(slots=True)
class Wanted:
    """Which dead letters: what is empty matches all."""

    topic: str = ""
    tag: str = ""
    key: str = ""
    contains: str = ""
    filter: str = ""
    dead_from: str = ""
    dead_to: str = ""
    failure: str = ""
    """The fingerprint of a failure group."""
    _filter: Filter | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.filter:
            self._filter = Filter(self.filter)

    @property
    def at_once(self) -> int:
        """How many may be looked at in one go."""
        return LOOKED_AT_ONCE if self._filter is None else min(LOOKED_AT_ONCE, self._filter.at_once)

    def plain(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def matches(self, m: StoredMessage) -> bool:
        return not m.corrupt and self.fits(decode_payload(m.payload), m.committed_us)

    def fits(self, p: Payload, dead_us: int) -> bool:
        """Whether a dead letter of this content, dead since `dead_us` (microseconds since 1970), is one of them."""
        if self.dead_from and dead_us < microseconds(datetime.fromisoformat(self.dead_from)):
            return False
        if self.dead_to and dead_us >= microseconds(datetime.fromisoformat(self.dead_to)):
            return False
        reason = (p.headers or {}).get(DEAD_LETTER_REASON, "")
        return (
            self.topic in ("", p.topic)
            and self.tag in ("", p.tag)
            and self.key in ("", p.key)
            and self.contains in reason
            and self.failure in ("", kind_of(reason).fingerprint)
            and (self._filter is None or self._filter.fits(p))
        )


class Redriving(Protocol):
    """Sends a group's dead letters again, some at a time, whoever keeps them."""

    async def bounds(self, group: str) -> tuple[int, int, int]:
        """The offset of a group's first letter, the one behind its last, and how many there are at most between them.

        Raises Unavailable.
        """
        ...

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        """Look at the next few from an offset on, at most `most`, and send (or drop) those that match.

        Gives what became of each, and the offset to go on from; None where none is left. Repeating it sends none twice.
        Raises Unavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class RedriveSpec:
    """Which letters of a group a job sends, or drops: those of offsets before `until` that match."""

    group: str
    wanted: Wanted
    until: int
    replay_effects: bool = False
    force: bool = False
    drop: str = ""
    """Who drops them, and why; empty: they are sent."""
