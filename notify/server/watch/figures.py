"""Rates, lag and ages of topics and groups, each minute, over an hour and a day: for the charts of the console.

A file keeps them over a restart (notify/server/watch/chart_file.py). At most MOST_SERIES topics and groups have
figures. A request for the figures of another one drops those of the one that was requested least recently.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from notify.errors import NotifyError
from notify.protocol.latency import SHARES
from notify.runtime.clock import Clock
from notify.server.latency import Latencies
from notify.server.tasks import ended, repeated
from notify.server.watch.series import Field, Kept, Series, step_seconds

EVERY_SECONDS = 60.0
MOST_SERIES = 1000
"""The most topics, and the most groups, that have figures: a group takes some 14 KiB."""
SLICE_SECONDS = 0.005
"""How long figures are counted before other tasks of the event loop run."""

OF_TOPICS = ("commit_to_queue",)
OF_GROUPS = ("commit_to_ack", "commit_to_consumer", "handler")
"""The kinds of latency that charts of topics and groups show."""


def _latencies(kinds: Sequence[str]) -> tuple[Field, ...]:
    return tuple(Field(f"{kind}_{share}", is_highest=True) for kind in kinds for share in SHARES)


TOPIC_FIELDS = (Field("sent"), Field("lag", is_highest=True), *_latencies(OF_TOPICS))
GROUP_FIELDS = (
    Field("settled"),
    Field("arrived"),
    Field("lag", is_highest=True),
    Field("oldest_seconds", is_highest=True),
    Field("dead_letters", is_highest=True),
    *_latencies(OF_GROUPS),
)


class Counts(NamedTuple):
    """The counts of one topic or group now."""

    total: int | None
    """Messages that were ever sent to a topic, or settled by a group; None if unknown."""
    lag: int | None
    """Messages that are not settled; for a topic, by its slowest group."""
    oldest_seconds: float | None = None
    """Age of the oldest message that is not settled; None if there is no such message, or if unknown."""
    latencies: Mapping[str, float | None] = {}
    """Seconds of the last whole minute, by the names of fields; a field that is missing is unknown."""
    dead_letters: int | None = None
    """A group's unresolved dead letters; None if unknown."""


class Counted(Protocol):
    """The part of a queue engine that charts need.

    Methods raise NotifyError if the topic or group is gone, or the engine does not answer.
    """

    def topics(self) -> Sequence[str]:
        """The names of topics, without those of dead letters and retries."""
        ...

    def topic(self, name: str) -> Counts: ...

    def groups(self) -> Sequence[str]: ...

    def group(self, name: str) -> Counts: ...


class _Kept:
    """The series of topics, or of groups; the one that was requested last is the last of them."""

    def __init__(
        self, names: Callable[[], Sequence[str]], count: Callable[[str], Counts], fields: Sequence[Field]
    ) -> None:
        self._names = names
        self._count = count
        self._fields = fields
        self._series: dict[str, Series] = {}
        self._before: dict[str, tuple[float, int, int]] = {}
        """Each topic's or group's last total, when it was read (seconds since 1970), and its lag then."""

    async def sample(self, now: Callable[[], float]) -> None:
        names = self._names()
        for deleted in self._series.keys() - set(names):
            self._drop(deleted)
        for name in names:
            if len(self._series) >= MOST_SERIES:
                break
            self._series.setdefault(name, Series(self._fields))
        began = time.perf_counter()
        for name in list(self._series):
            if time.perf_counter() - began > SLICE_SECONDS:
                await asyncio.sleep(0)  # lets other tasks run
                began = time.perf_counter()
            if name in self._series:
                self._add(name, now())

    def _add(self, name: str, at: float) -> None:
        try:
            total, lag, oldest, latencies, dead_letters = self._count(name)
        except NotifyError:
            return  # it was deleted in the meantime
        rate = arrived = None
        if total is not None:
            then, before, lag_before = self._before.get(name, (at, total, lag or 0))
            if at > then:
                # The total of a group falls if the group is reset; the rate is 0 then.
                rate = max(0, total - before) / (at - then)
                arrived = max(0, total - before + (lag or 0) - lag_before) / (at - then)
            self._before[name] = (at, total, lag or 0)
        known: dict[str, float | None] = {self._fields[0].name: rate, "arrived": arrived, "lag": lag}
        known |= {"oldest_seconds": oldest, "dead_letters": dead_letters, **latencies}
        self._series[name].add(at, [known.get(field.name) for field in self._fields])

    def of(self, name: str, span: str, at: float) -> dict[str, Any]:
        """The columns of a topic or group, which has figures from now on. Raises NotifyError if it does not exist."""
        series = self._series.pop(name, None)
        if series is None:
            self._count(name)  # raises if the name does not exist
            if len(self._series) >= MOST_SERIES:
                self._drop(next(iter(self._series)))
            self._series[name] = Series(self._fields)
            self._add(name, at)
        else:
            self._series[name] = series
        return self._series[name].columns(span)

    def kept(self) -> Iterator[tuple[str, Kept]]:
        """A copy of each series for a file; a series that is dropped during the iteration is left out."""
        for name in list(self._series):
            if name in self._series:
                yield name, self._series[name].kept()

    def restore(self, stored: Mapping[str, Kept]) -> None:
        """Restore the series of a file; the next `sample` drops those of deleted topics and groups."""
        for name, series in list(stored.items())[:MOST_SERIES]:
            self._series.setdefault(name, Series(self._fields)).restore(series)

    def newest(self, name: str, field: str) -> float | None:
        series = self._series.get(name)
        return None if series is None else series.newest(field)

    def lately(self, name: str, field: str, minutes: int) -> list[float]:
        """The figures of a field in the last minutes that are known."""
        series = self._series.get(name)
        return [] if series is None else series.lately(field, minutes)

    def _drop(self, name: str) -> None:
        del self._series[name]
        self._before.pop(name, None)


class Figures:
    """Samples topics and groups every minute until it is stopped. Methods belong to the event loop."""

    def __init__(self, counted: Counted, clock: Clock, latencies: Latencies | None = None) -> None:
        """`latencies`: whose minute ends with each sample."""
        self._clock = clock
        self._latencies = Latencies() if latencies is None else latencies
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
        self._latencies.turn()
        for series in (self._topics, self._groups):
            try:
                await series.sample(self._now)
            except NotifyError:
                continue  # the engine is not on this server, or does not answer now

    def _now(self) -> float:
        return self._clock() / 1e6

    def kept_topics(self) -> Iterator[tuple[str, Kept]]:
        """Topics with their figures, for a file."""
        return self._topics.kept()

    def kept_groups(self) -> Iterator[tuple[str, Kept]]:
        """Groups with their figures, for a file."""
        return self._groups.kept()

    def restore(self, topics: Mapping[str, Kept], groups: Mapping[str, Kept]) -> None:
        """Restore the figures of a file, before this server's first sample."""
        self._topics.restore(topics)
        self._groups.restore(groups)

    def topic(self, name: str, span: str) -> dict[str, Any]:
        """A topic's TOPIC_FIELDS over a span, by `at`: `sent` (messages a second), `lag` of its slowest group,
        and how long its messages took to their queues."""
        return {"span": span, "step_seconds": step_seconds(span)} | self._topics.of(name, span, self._now())

    def group(self, name: str, span: str) -> dict[str, Any]:
        """A group's GROUP_FIELDS over a span, by `at`: `settled` and `arrived` (messages a second), `lag`,
        `oldest_seconds`, unresolved `dead_letters`, and how long its messages and handlers took."""
        return {"span": span, "step_seconds": step_seconds(span)} | self._groups.of(name, span, self._now())

    def lately(self, group: str) -> dict[str, float | None]:
        """A group's last minute: messages that arrived and were settled per second, and the age of the oldest; None if
        unknown."""
        return {
            "arrived_per_second": self._groups.newest(group, "arrived"),
            "settled_per_second": self._groups.newest(group, "settled"),
            "oldest_seconds": self._groups.newest(group, "oldest_seconds"),
        }

    def is_failing(self, group: str, dead_letters: int) -> bool:
        """Whether a group with this many unresolved dead letters has more than in one of the last two minutes."""
        return dead_letters > min(self._groups.lately(group, "dead_letters", 2), default=dead_letters)

    def rate(self, topic: str) -> float | None:
        """Messages per second that were sent to a topic in the last minute; None if unknown."""
        return self._topics.newest(topic, "sent")
