"""The instants of a schedule: those of a cron expression in a time zone, or of an interval."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from notify.errors import InvalidRequest
from notify.protocol.limits import check_between, digits

SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 366 * 86_400.0
"""The bounds of an interval."""
CRON_CHARACTERS = 200
_CRON = re.compile(r"[0-9A-Za-z*/,#-]+( +[0-9A-Za-z*/,#-]+){4}\Z").match
_ZONE = re.compile(r"(?!posix/|right/|localtime\Z|posixrules\Z)[A-Za-z][A-Za-z0-9_+/-]{0,63}\Z").match
"""The names that mean the same on every machine: `right/` counts leap seconds, `localtime` is the machine's own."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST_CHANGE = timedelta(hours=3)
"""More than any zone sets its clocks back by at once."""


class Timetable:
    """The instants at which a schedule is due, in microseconds since 1970."""

    def __init__(self, cron: str | None, every: float | None, zone: str) -> None:
        """`cron`: five fields, read in `zone`; `every`: seconds, counted from 1970-01-01T00:00:00Z. Exactly one is
        given. Raises InvalidRequest."""
        if (cron is None) == (every is None):
            raise InvalidRequest("a schedule has either cron or every: give exactly one of them", "invalid_schedule")
        self._zone = zone_of(zone)
        self._cron = cron or ""
        self._every_us = 0
        self._goes_by_hours = False
        if every is not None:
            check_between("every", every, SHORTEST_SECONDS, LONGEST_SECONDS)
            self._every_us = round(every * 1_000_000)
            return
        try:
            if len(self._cron) > CRON_CHARACTERS or not _CRON(self._cron):
                raise CronSimError("it should be five fields: minute, hour, day of month, month, day of week")
            CronSim(self._cron, _EPOCH)
            _check_steps(self._cron)
            minutes, hours, *_ = self._cron.split()
            self._goes_by_hours = minutes.startswith("*") or hours.startswith("*")
        except CronSimError as error:
            raise InvalidRequest(f"cron is {self._cron[:100]!r}: {error}", "invalid_schedule") from None

    def after(self, after_us: int) -> Iterator[int]:
        """The instants after a time, each once, in order.

        A cron expression with neither `*` at the beginning of its minutes nor of its hours names times of day, as in
        Debian's cron: a time that the clocks skip is due at the first instant after the gap, and a time that comes
        twice is due the first time only. Any other expression goes by the hours that pass: it has no instant in a gap,
        and is due in both passes of an hour that comes twice.
        """
        if self._every_us:
            at_us = after_us // self._every_us * self._every_us
            while True:
                at_us += self._every_us
                yield at_us
        # cronsim begins with the second after the one that it is given. It does not know which pass of an hour that
        # comes twice it is in, and moves all times in a gap to its end: so an instant may be early, or come again.
        last_us = after_us
        began = (_EPOCH + after_us * _MICROSECOND).astimezone(self._zone)
        for at_us in self._of_hours(began) if self._goes_by_hours else map(_instant, CronSim(self._cron, began)):
            if at_us > last_us:
                last_us = at_us
                yield at_us

    def _of_hours(self, began: datetime) -> Iterator[int]:
        """The instants at which the clocks show a time of the expression, in order; some may be before `began`.

        cronsim finds the times of a clock that never changes. By itself it advances by whole hours, and loses instants
        where a zone changes its clocks by half an hour (Australia/Lord_Howe).
        """
        again = deque[int]()
        """Instants of second passes, which come after all of the first pass."""
        for shown in CronSim(self._cron, began.replace(tzinfo=None) - _LONGEST_CHANGE):
            first, second = (self._shows(shown, fold) for fold in (0, 1))
            if first is None:
                continue  # the clocks skip it
            while again and again[0] < first:
                yield again.popleft()
            yield first
            if second is not None and second != first:
                again.append(second)
        yield from again

    def _shows(self, shown: datetime, fold: int) -> int | None:
        """The instant at which the clocks show a time, in the first or the second pass; None if they skip it."""
        at = shown.replace(tzinfo=self._zone, fold=fold).astimezone(UTC)
        return _instant(at) if at.astimezone(self._zone).replace(tzinfo=None) == shown else None

    def next(self, after_us: int, count: int) -> list[int]:
        """The first `count` instants after a time; fewer if there are no more within 50 years."""
        return list(islice(self.after(after_us), count))

    def latest(self, after_us: int, until_us: int, most: int) -> list[int]:
        """The last instants in (after, until], at most `most`, in order.

        The time that it takes depends on `most`, not on how long ago `after_us` is.
        """
        if self._every_us:
            last_us = until_us // self._every_us * self._every_us
            count = min(most, last_us // self._every_us - after_us // self._every_us)
            return [last_us - back * self._every_us for back in reversed(range(count))]
        span_us = most * 60_000_000
        while True:
            start_us = max(after_us, until_us - span_us)
            found = deque(takewhile(lambda at_us: at_us <= until_us, self.after(start_us)), maxlen=most)
            if start_us == after_us or len(found) == most:
                return list(found)
            span_us *= 2


def _check_steps(cron: str) -> None:
    """Raises CronSimError for a step beyond its field: `*/90` is due at minute 0 only, and not every 90 minutes."""
    for field, most in zip(cron.split(), (60, 24, 31, 12, 7), strict=True):
        for part in field.split(","):
            step = digits(part.partition("/")[2])
            if step is not None and step > most:
                raise CronSimError(f"a step of this field is {most} at most, not {step}; `every` is a longer interval")


def _instant(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def zone_of(name: str) -> ZoneInfo:
    """The IANA time zone of this name. Raises InvalidRequest if this machine's database does not have it."""
    try:
        if _ZONE(name) is not None:
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise InvalidRequest(
        f"the server knows no time zone {name[:64]!r}: write an IANA name such as Europe/Berlin or UTC; if it is one, "
        "the server's machine lacks the database of time zones (pip install tzdata)",
        "invalid_schedule",
    )
