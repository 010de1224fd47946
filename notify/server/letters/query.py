"""The conditions that choose dead letters, and what administrators ask to be done with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from notify.protocol.filter import Filter
from notify.protocol.message import DEAD_LETTER_REASON
from notify.protocol.wire import Payload, microseconds
from notify.server.letters.engine import LOOKED_AT_ONCE, REDRIVE, Closing, Letter
from notify.server.letters.failures import kind_of


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
        """How many letters may be compared without a pause."""
        return LOOKED_AT_ONCE if self._filter is None else min(LOOKED_AT_ONCE, self._filter.at_once)

    def plain(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def matches(self, letter: Letter) -> bool:
        return self.fits(letter.payload(), letter.dead_us)

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


@dataclass(frozen=True, slots=True)
class Chosen:
    """The dead letters that a request closes."""

    ids: tuple[str, ...] | None
    """Message ids; None: letters that match `wanted`, at most `most`."""
    wanted: LetterQuery
    most: int
    how: Closing = REDRIVE
    offset: int = 0
    """The number where the search begins: `next_offset` of the result of an earlier call. Ids need one only over Kafka,
    which has no index of them."""


@dataclass(frozen=True, slots=True)
class Edited:
    """A dead letter to redrive with other content."""

    id: str
    changes: Mapping[str, Any]
    """The fields to change: `body` (text) or `body_base64`, `key`, `tag`, `headers`."""
    how: Closing = REDRIVE


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The letters of a group that a job closes: the matching ones with numbers before `until`."""

    group: str
    wanted: LetterQuery
    until: int
    how: Closing = REDRIVE
