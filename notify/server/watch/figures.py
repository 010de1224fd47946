"""Rates, lag and ages of topics and groups, each minute, over an hour and a day: for the charts of the console.

A file keeps them over a restart (notify/server/watch/chart_file.py). So many topics and groups have them at most;
whoever looks at one that has none puts it in the place of the one that nobody has looked at for longest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from notify.clock import Clock
from notify.errors import NotifyError
from notify.server.tasks import ended, repeated
from notify.server.watch.series import SPANS, Field, Kept, Series

EVERY_SECONDS = 60.0
MOST_SERIES = 1000
"""Topics, and groups, that have figures: some 3 KiB each."""
SLICE_SECONDS = 0.005
"""So long figures are counted in one go, and one topic or group more: then others have their turn."""

TOPIC_FIELDS = (Field("sent"), Field("lag", is_highest=True))
GROUP_FIELDS = (Field("settled"), Field("lag", is_highest=True), Field("oldest_seconds", is_highest=True))


class Counts(NamedTuple):
    """One topic or group now."""

    total: int | None
    """Messages that were ever sent to a topic, or settled by a group; None where that is not known."""
    lag: int | None
    """Messages that are not settled; of a topic those of its slowest group."""
    oldest_seconds: float | None = None
    """Age of the oldest of them; None where there is none, or it is not known."""


class Counted(Protocol):
    """A queue engine, as far as charts look at it. Methods raise NotifyError for what is gone or does not answer."""

    def topics(self) -> Sequence[str]:
        """The names of topics of messages, those of dead letters and retries left out."""
        ...

    def topic(self, name: str) -> Counts: ...

    def groups(self) -> Sequence[str]: ...

    def group(self, name: str) -> Counts: ...


class _Kept:
    """The series of topics, or of groups, the one that was looked at last behind the others."""

    def __init__(
        self, names: Callable[[], Sequence[str]], count: Callable[[str], Counts], fields: Sequence[Field]
    ) -> None:
        self._names = names
        self._count = count
        self._fields = fields
        self._series: dict[str, Series] = {}
        self._before: dict[str, tuple[float, int]] = {}
        """When each total was looked at last (seconds since 1970), and what it was."""

    async def sample(self, now: Callable[[], float]) -> None:
        known = self._names()
        for gone in self._series.keys() - set(known):
            self._drop(gone)
        for name in known:
            if len(self._series) >= MOST_SERIES:
                break
            self._series.setdefault(name, Series(self._fields))
        began = time.perf_counter()
        for name in list(self._series):
            if time.perf_counter() - began > SLICE_SECONDS:
                await asyncio.sleep(0)  # a turn for everybody else
                began = time.perf_counter()
            if name in self._series:
                self._add(name, now())

    def _add(self, name: str, at: float) -> None:
        try:
            total, lag, oldest = self._count(name)
        except NotifyError:
            return  # it was deleted meanwhile
        rate = None
        if total is not None:
            then, before = self._before.get(name, (at, total))
            # A group that is set back settles nothing by that.
            rate = max(0, total - before) / (at - then) if at > then else None
            self._before[name] = (at, total)
        self._series[name].add(at, (rate, lag, oldest)[: len(self._fields)])

    def of(self, name: str, span: str, at: float) -> dict[str, Any]:
        """The columns of one, which has figures from now on. Raises NotifyError for a name that there is not."""
        series = self._series.pop(name, None)
        if series is None:
            self._count(name)  # raises for a name that there is not
            if len(self._series) >= MOST_SERIES:
                self._drop(next(iter(self._series)))
            self._series[name] = Series(self._fields)
            self._add(name, at)
        else:
            self._series[name] = series
        return self._series[name].columns(span)

    def kept(self) -> Iterator[tuple[str, Kept]]:
        """A copy of each series for a file, one after the other: a series may go meanwhile."""
        for name in list(self._series):
            if name in self._series:
                yield name, self._series[name].kept()

    def restore(self, kept: Mapping[str, Kept]) -> None:
        """Take the series that a file had; those of topics and groups that are gone go with the next figure."""
        for name, one in list(kept.items())[:MOST_SERIES]:
            self._series.setdefault(name, Series(self._fields)).restore(one)

    def newest(self, name: str, field: str) -> float | None:
        series = self._series.get(name)
        return None if series is None else series.newest(field)

    def _drop(self, name: str) -> None:
        del self._series[name]
        self._before.pop(name, None)


class Figures:
    """Looks every minute until it is stopped. Methods belong to the event loop."""

    def __init__(self, counted: Counted, clock: Clock) -> None:
        self._clock = clock
        self._topics = _Kept(counted.topics, counted.topic, TOPIC_FIELDS)
        self._groups = _Kept(counted.groups, counted.group, GROUP_FIELDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        work = repeated(self.sample, lambda: EVERY_SECONDS, "figures_failed", at_once=True)
        self._task = asyncio.get_running_loop().create_task(work)

    async def stop(self) -> None:
        await ended(self._task)

    async def sample(self) -> None:
        """Add a figure of each topic and group."""
        for kept in (self._topics, self._groups):
            try:
                await kept.sample(self._now)
            except NotifyError:
                continue  # its engine is not here, or does not answer now

    def _now(self) -> float:
        return self._clock() / 1e6

    def kept_topics(self) -> Iterator[tuple[str, Kept]]:
        """Topics with their figures, for a file."""
        return self._topics.kept()

    def kept_groups(self) -> Iterator[tuple[str, Kept]]:
        """Groups with their figures, for a file."""
        return self._groups.kept()

    def restore(self, topics: Mapping[str, Kept], groups: Mapping[str, Kept]) -> None:
        """Take the figures that a file had, before the first ones of this server."""
        self._topics.restore(topics)
        self._groups.restore(groups)

    def topic(self, name: str, span: str) -> dict[str, Any]:
        """A topic's `sent` (a second) and `lag` (the most of a group) over a span of SPANS, by `at`."""
        return {"span": span, "step_seconds": SPANS[span].step_seconds} | self._topics.of(name, span, self._now())

    def group(self, name: str, span: str) -> dict[str, Any]:
        """A group's `settled` (a second), `lag` and `oldest_seconds` over a span of SPANS, by `at`."""
        return {"span": span, "step_seconds": SPANS[span].step_seconds} | self._groups.of(name, span, self._now())

    def rate(self, topic: str) -> float | None:
        """Messages a second that were sent to a topic in the last minute; None where that is not known."""
        return self._topics.newest(topic, "sent")
