"""A schedule: what was declared, how far its instants are done, and which of them are due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from notify.errors import InvalidRequest, NotifyError
from notify.protocol import ids
from notify.protocol.large_bodies import PLACE
from notify.protocol.limits import SCHEDULED_BYTES, check_between
from notify.protocol.message import SCHEDULE, SCHEDULED_FOR
from notify.protocol.wire import JsonSchedule, PackedPublished, PackedSchedule, Payload, body_fields, instant

if TYPE_CHECKING:
    from notify.server.schedules.timetable import Timetable

MISSED_US = 60_000_000
"""An instant whose message is not sent after this time is missed: the catch-up policy decides about it."""
STATES = ("waiting", "late", "paused", "broken", "ended")
SKIP, LAST, ALL = "skip", "last", "all"
CATCH_UP = (SKIP, LAST, ALL)
MOST_CAUGHT_UP = 1000
"""The most missed instants that are sent, and that are counted."""


class Declaration(msgspec.Struct, frozen=True, omit_defaults=True):
    """A schedule as it was declared; its JSON is what is stored, and compared."""

    message: Payload
    cron: str | None = None
    every: float | None = None
    zone: str = "UTC"
    catch_up: str = LAST
    catch_up_most: int = 100

    @property
    def when(self) -> tuple[str | None, float | None, str]:
        """The part that decides about the instants."""
        return self.cron, self.every, self.zone


def declaration_of(request: JsonSchedule | PackedSchedule, message: Payload) -> Declaration:
    """The declaration of a request, whose message was admitted as `message`. Raises InvalidRequest."""
    if request.message.delay is not None or request.message.deliver_at is not None:
        raise InvalidRequest("a schedule's message has no delay: let the schedule be due later", "invalid_schedule")
    if PLACE in (message.headers or {}):
        raise InvalidRequest(
            f"a schedule's message has its body in itself, not in a store (header {PLACE}): a sweep of the store does "
            "not read schedules, and would delete the body",
            "invalid_schedule",
        )
    if len(message.body) > SCHEDULED_BYTES:
        raise InvalidRequest(
            f"a schedule's message has at most {SCHEDULED_BYTES} bytes, this one {len(message.body)}: name what the "
            "consumer shall read itself",
            "out_of_bounds",
        )
    if request.catch_up not in CATCH_UP:
        raise InvalidRequest(f"catch_up is {request.catch_up[:40]!r}: write {', '.join(CATCH_UP)}", "invalid_schedule")
    check_between("catch_up_most", request.catch_up_most, 1, MOST_CAUGHT_UP)
    return Declaration(message, request.cron, request.every, request.zone, request.catch_up, request.catch_up_most)


def timetable_of(declaration: Declaration) -> Timetable:
    """The instants of a declaration. Raises InvalidRequest."""
    from notify.server.schedules.timetable import Timetable  # with cronsim, which a server without schedules needs not

    return Timetable(*declaration.when)


def encoded(declaration: Declaration) -> str:
    """The declaration as it is stored: equal declarations have equal texts."""
    return msgspec.json.encode(declaration, order="sorted").decode()


def headers_of(name: str, instant_us: int) -> dict[str, str]:
    """The headers that say why a message exists."""
    return {SCHEDULE: name, SCHEDULED_FOR: instant(instant_us)}


class Due(NamedTuple):
    """The instants of a schedule to send now, and how many earlier ones are skipped."""

    from_us: int
    """How far the schedule was, recorded or not."""
    instants: list[int]
    missed: int
    until_us: int
    """Every instant up to here is done once these are sent."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of a schedule: its instants in (from_us, to_us] are done, `sent` by messages and `missed` left out."""

    name: str
    secret: str
    from_us: int
    to_us: int
    sent: int
    missed: int
    last_instant_us: int
    sent_us: int

    def and_then(self, further: Mark) -> Mark:
        """This step and the one that follows it as one."""
        last = further if further.sent else self
        return Mark(
            self.name, self.secret, self.from_us, further.to_us, self.sent + further.sent, self.missed + further.missed,
            last.last_instant_us, last.sent_us,
        )  # fmt: skip


@dataclass(slots=True)
class Schedule:
    """A stored schedule, as this server knows it. Times are in microseconds since 1970, 0 for never."""

    name: str
    secret: str
    place: str
    """The shard whose log gets its messages; "" for a storage that servers share."""
    declaration: Declaration
    paused: bool
    done_us: int
    """Every instant up to this one was sent, or is skipped."""
    sent: int
    missed: int
    last_instant_us: int
    last_sent_us: int
    changed_us: int
    who: str
    timetable: Timetable | None = None
    next_us: int = 0
    """The first instant that is not done; 0: there is none, or it is unknown."""
    fault: str = ""
    """Why its messages cannot be sent; "" if they can."""
    retry_us: int = 0
    """When a message that was refused is tried again."""
    missed_us: int = 0
    """When this server last left instants out."""
    unrecorded: Mark | None = None
    """The step that was done, but could not be recorded yet."""
    size: int = 0
    """The bytes of its declaration."""
    _text: int = 0
    """A hash of its declaration's text."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Schedule:
        """The schedule of a row. One that this server cannot read has a `fault`."""
        fields = dict(row) | {"paused": bool(row["paused"])}
        text, fault = str(row["declaration"]), ""
        try:
            declaration = msgspec.json.decode(text, type=Declaration)
        except msgspec.DecodeError as error:  # a later version made it
            declaration, fault = Declaration(Payload("", b"")), f"this server cannot read it: {error}"
        schedule = cls(
            **(fields | {"declaration": declaration, "size": len(text), "_text": hash(text), "fault": fault})
        )
        if not fault:
            try:
                schedule.timetable = timetable_of(declaration)
            except NotifyError as error:
                schedule.fault = str(error)
        schedule.find_next()
        return schedule

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Whether this is the schedule of a row, unchanged except for how far it is."""
        known = (self.secret, self.changed_us, self.paused, self._text)
        return known == (row["secret"], row["changed_us"], bool(row["paused"]), hash(row["declaration"]))

    def move_to(self, row: Mapping[str, Any]) -> None:
        """Take over how far the same schedule is in a row, unless the row was read before this server moved it on."""
        if row["done_us"] > self.done_us:
            self.unrecorded = None
            self.done_us, self.sent, self.missed = row["done_us"], row["sent"], row["missed"]
            self.last_instant_us, self.last_sent_us = row["last_instant_us"], row["last_sent_us"]
            self.find_next()

    def find_next(self) -> None:
        """Find the first instant that is not done."""
        found = [] if self.timetable is None else self.timetable.next(self.done_us, 1)
        self.next_us = found[0] if found else 0

    def due(self, now_us: int) -> Due:
        """The instants to send now; the catch-up policy decides about those that are older than MISSED_US."""
        assert self.timetable is not None
        policy, most = self.declaration.catch_up, self.declaration.catch_up_most
        from_us = self.done_us if self.unrecorded is None else self.unrecorded.to_us
        found = self.timetable.latest(from_us, now_us, MOST_CAUGHT_UP)
        in_time = sum(now_us - at_us <= MISSED_US for at_us in found)
        count = in_time
        if policy == ALL:
            count = in_time + min(most, len(found) - in_time)
        elif policy == LAST:
            count = max(in_time, min(1, len(found)))
        sent = found[len(found) - count :]
        return Due(from_us, sent, len(found) - count, found[-1] if found else from_us)

    def message(self, instant_us: int) -> PackedPublished:
        """The message for an instant: the same one however often it is made, unless the schedule was changed."""
        payload = self.declaration.message
        headers = (payload.headers or {}) | headers_of(self.name, instant_us)
        return PackedPublished(
            topic=payload.topic,
            body=payload.body,
            key=payload.key,
            tag=payload.tag,
            headers=headers,
            ttl=payload.ttl,
            id=ids.message_id(ids.scheduled(self.secret, instant_us), 0),
        )

    def state(self, now_us: int) -> str:
        """One of STATES."""
        if self.paused:
            return "paused"
        if self.fault and not self.retry_us:
            return "broken"
        if not self.next_us:
            return "ended"
        return "late" if now_us - self.next_us > MISSED_US else "waiting"

    def shown(self, now_us: int, runs: int) -> dict[str, Any]:
        """The schedule as an admin route shows it, with its next `runs` instants."""
        declared, message = self.declaration, self.declaration.message
        coming = [] if self.timetable is None or self.paused else self.timetable.next(self.done_us, runs)
        return {
            "name": self.name,
            "state": self.state(now_us),
            "topic": message.topic,
            "key": message.key,
            "tag": message.tag,
            "cron": declared.cron,
            "every": declared.every,
            "zone": declared.zone,
            "catch_up": declared.catch_up,
            "catch_up_most": declared.catch_up_most,
            "shard": self.place or None,
            "next": [instant(at_us) for at_us in coming],
            "late_seconds": round(max(0, now_us - self.next_us) / 1e6, 3) if self.next_us and not self.paused else 0.0,
            "last_instant": _instant(self.last_instant_us),
            "last_sent_at": _instant(self.last_sent_us),
            "lag": round((self.last_sent_us - self.last_instant_us) / 1e6, 3) if self.last_sent_us else None,
            "sent": self.sent,
            "missed": self.missed,
            "fault": self.fault,
            "changed_at": instant(self.changed_us),
            "who": self.who,
        }

    def content(self) -> dict[str, Any]:
        """The message that it sends, as an admin route shows it."""
        message = self.declaration.message
        return body_fields(message.body) | {"headers": message.headers or {}, "ttl": message.ttl}


def _instant(at_us: int) -> str | None:
    return instant(at_us) if at_us else None
