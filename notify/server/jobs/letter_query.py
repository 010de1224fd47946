"""The conditions that choose dead letters to send again or drop, and the protocol of a queue engine that does so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from notify.protocol.filter import Filter
from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import Payload, decode_payload, microseconds
from notify.server.jobs.failures import kind_of
from notify.storage.records import StoredMessage

LOOKED_AT_ONCE = 500
"""The most dead letters that are read without a pause: a search through all must not hold up other work."""
LOOKED_AT = 20_000
"""The most dead letters that one request looks at; its answer says where to go on."""
SEARCH_SECONDS = 5.0
"""How long one request looks for dead letters, plus one part of the search; its answer says where to go on."""


@dataclass(slots=True)
class LetterQuery:
    """Conditions on dead letters; an empty condition matches all letters."""

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
        """How many letters may be read without a pause."""
        return LOOKED_AT_ONCE if self._filter is None else min(LOOKED_AT_ONCE, self._filter.at_once)

    def plain(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def matches(self, message: StoredMessage) -> bool:
        return not message.corrupt and self.fits(decode_payload(message.payload), message.committed_us)

    def fits(self, payload: Payload, dead_us: int) -> bool:
        """Whether a dead letter with this payload, dead since `dead_us` (microseconds since 1970), matches."""
        if self.dead_from and dead_us < microseconds(datetime.fromisoformat(self.dead_from)):
            return False
        if self.dead_to and dead_us >= microseconds(datetime.fromisoformat(self.dead_to)):
            return False
        reason = (payload.headers or {}).get(DEAD_LETTER_REASON, "")
        return (
            self.topic in ("", payload.topic)
            and self.tag in ("", payload.tag)
            and self.key in ("", payload.key)
            and self.contains in reason
            and (not self.failure or self.failure == kind_of(reason).fingerprint)
            and (self._filter is None or self._filter.fits(payload))
        )


class Redriving(Protocol):
    """Sends a group's dead letters again, a few at a time; each queue engine implements this."""

    async def bounds(self, group: str) -> tuple[int, int, int]:
        """The offset of a group's first letter, the offset after its last, and the most letters between them.

        Raises Unavailable.
        """
        ...

    async def send_next(self, spec: RedriveSpec, offset: int, most: int) -> tuple[list[dict[str, Any]], int] | None:
        """Read at most `most` letters from an offset on, and send (or drop) those that match.

        Returns the result for each letter and the offset to continue from; None if no letters are left. Repeating it
        sends no letter twice. Raises Unavailable.
        """
        ...


@dataclass(frozen=True, slots=True)
class RedriveSpec:
    """The letters of a group that a job sends or drops: the matching letters at offsets before `until`."""

    group: str
    wanted: LetterQuery
    until: int
    replay_effects: bool = False
    force: bool = False
    drop: str = ""
    """Who drops the letters, and why; empty: they are sent."""
