"""How long messages and requests take: histograms by topic, group, producer group and route, in bounded memory.

A histogram is 20 counters, and two copies of them for the figures of the last minutes. What is measured where:
`commit_to_queue` in Delivery.placed, `commit_to_consumer` in Group._lease, `commit_to_ack` in Settling._ack,
`check_back` in Outcomes, `request` in DataRoutes.answer; consumers measure `consumer_to_handler` and `handler`, in
Hand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from notify.protocol.latency import BOUNDS_US, BUCKETS, Histogram, shares, shown

MOST_NAMES = 1000
"""The most topics, groups and so on of a kind with a histogram of their own; the others share one."""
MOST_LABELLED = 50
"""The most of a kind that have series of their own in /metrics: the first with a figure. The others are added up."""
OTHER = "(other)"
"""The label's value for all others; no topic or group can have this name."""
EXEMPLAR_US = 10_000_000
"""How long the exemplar of a bucket stays before another message may take its place."""
LOOK_US = 1_000_000
"""The least time between two looks for the exemplar of a bucket: most messages may have no sampled trace."""


class Kind(NamedTuple):
    """A kind of latency; its metric is `notify_{name}_seconds`."""

    name: str
    label: str
    text: str


KINDS = (
    Kind(
        "commit_to_queue",
        "topic",
        "Time from the record of a commit until its messages are durable in their queues, without delayed messages",
    ),
    Kind(
        "commit_to_consumer",
        "group",
        "Time from a message's commit, or when it was due, until its first delivery left for a consumer",
    ),
    Kind(
        "consumer_to_handler",
        "group",
        "Time that messages waited in their consumer for a handler, as it reports",
    ),
    Kind("handler", "group", "Time that the call of a handler took, for each of its messages, as its consumer reports"),
    Kind("commit_to_ack", "group", "Time from a message's commit, or when it was due, until it was acknowledged"),
    Kind("check_back", "producer_group", "Time from a check that a producer was handed until its answer"),
    Kind("request", "route", "Time that requests to a data route took, without those that wait for messages or checks"),
)
"""Every kind, in the order of a message's way."""
OF_GROUPS = tuple(kind.name for kind in KINDS if kind.label == "group")
IN_LISTS = ("commit_to_ack", "handler")
"""The kinds that lists of groups show."""


class Exemplar(NamedTuple):
    """One of the durations of a bucket, and the trace that shows the cause."""

    us: int
    at_us: int
    """When it ended, in microseconds since 1970."""
    trace_id: str
    """32 hexadecimal digits."""


class Latency(Histogram):
    """A histogram since the start, which knows what it counted in the last minutes."""

    __slots__ = ("_before", "_last", "_looked_us", "exemplars", "is_labelled")

    def __init__(self, *, with_exemplars: bool = False) -> None:
        super().__init__()
        self.is_labelled: bool | None = None
        """Whether it has series of its own in /metrics; None: it has not been shown there yet."""
        self.exemplars: dict[int, Exemplar] | None = {} if with_exemplars else None
        """At most one for each bucket; None: none is kept, because this server does not trace."""
        self._looked_us = [0] * BUCKETS if with_exemplars else []
        """When an exemplar of each bucket was last looked for."""
        self._last = self._before = array("Q", self.counts)

    def exemplify(self, us: int, now_us: int, find_trace: Callable[[], str]) -> None:
        """Make a duration that ended now the exemplar of its bucket, unless that has a recent one.

        `find_trace` returns the id of its sampled trace, or "" if it has none. It may read a message, and is called
        only if the exemplar is wanted, at most once in LOOK_US for each bucket.
        """
        if self.exemplars is None or self.is_labelled is False:  # the sum of the others shows none
            return
        bucket = bisect_left(BOUNDS_US, us)
        known = self.exemplars.get(bucket)
        is_wanted = known is None or now_us - known.at_us >= EXEMPLAR_US
        if is_wanted and now_us - self._looked_us[bucket] >= LOOK_US:
            self._looked_us[bucket] = now_us
            trace_id = find_trace()
            if trace_id:
                self.exemplars[bucket] = Exemplar(max(0, us), now_us, trace_id)

    def turn(self) -> None:
        """End a minute."""
        self._before, self._last = self._last, array("Q", self.counts)

    def minute(self) -> list[int]:
        """The counts of the last whole minute."""
        return [last - before for last, before in zip(self._last, self._before, strict=True)]

    def lately(self) -> list[int]:
        """The counts of the last whole minute, and of the one that has begun."""
        if self.counts == self._before:  # many groups of a list are idle
            return [0] * BUCKETS
        return [now - before for now, before in zip(self.counts, self._before, strict=True)]


class Histograms:
    """The histograms of one kind, by the value of its label."""

    def __init__(self, *, with_exemplars: bool = False) -> None:
        self._with_exemplars = with_exemplars
        self._by_name: dict[str, Latency] = {}
        self._others = Latency()
        """The names that found no room, together."""
        self._gone = Histogram()
        """Names that are gone and had no series of their own: a counter must not fall."""
        self._labelled = 0

    def of(self, name: str) -> Latency:
        """The histogram of a name, made if there is room; otherwise the one that all others share."""
        latency = self._by_name.get(name)
        if latency is None:
            if len(self._by_name) >= MOST_NAMES:
                return self._others
            latency = self._by_name[name] = Latency(with_exemplars=self._with_exemplars)
        return latency

    def lately(self, name: str) -> dict[str, Any] | None:
        """The last one to two minutes of a name, as `shown`; None if it has no histogram of its own."""
        latency = self._by_name.get(name)
        return None if latency is None else shown(latency.lately())

    def counts(self, name: str) -> Sequence[int]:
        """A copy of all that a name has counted; zeros if it has no histogram of its own."""
        latency = self._by_name.get(name)
        return [0] * BUCKETS if latency is None else list(latency.counts)

    def minute(self, name: str) -> list[int] | None:
        """The counts of a name's last whole minute; None if it has no histogram of its own."""
        latency = self._by_name.get(name)
        return None if latency is None else latency.minute()

    def forget(self, name: str) -> None:
        """Drop the histogram of a topic or group that is deleted."""
        latency = self._by_name.pop(name, None)
        if latency is not None and latency.is_labelled:
            self._labelled -= 1
        elif latency is not None:
            self._gone.add_all(latency)

    def turn(self) -> None:
        """End a minute."""
        for latency in self._by_name.values():
            latency.turn()

    def samples(self) -> Iterator[tuple[str, Histogram]]:
        """The histograms of /metrics: at most MOST_LABELLED by their names, and the sum of the others."""
        others = Histogram()
        others.add_all(self._others)
        others.add_all(self._gone)
        for name, latency in self._by_name.items():
            if latency.is_labelled is None and any(latency.counts):
                # Once it is one of the others it stays there: their sum would fall.
                latency.is_labelled = self._labelled < MOST_LABELLED
                self._labelled += latency.is_labelled
            if latency.is_labelled:
                yield name, latency
            else:
                others.add_all(latency)
        if any(others.counts):
            yield OTHER, others


class Latencies:
    """All histograms of a server, by kind."""

    def __init__(self, *, with_exemplars: bool = False) -> None:
        """`with_exemplars`: whether histograms keep the traces of some messages."""
        self.kinds = {kind.name: Histograms(with_exemplars=with_exemplars) for kind in KINDS}

    def __getitem__(self, kind: str) -> Histograms:
        return self.kinds[kind]

    def group(self, name: str, kinds: Sequence[str] = OF_GROUPS) -> dict[str, Any]:
        """The last one to two minutes of a consumer group, by kind; None for a kind that is not measured for it."""
        return {kind: self.kinds[kind].lately(name) for kind in kinds}

    def minute(self, name: str, kinds: Sequence[str]) -> dict[str, float | None]:
        """The SHARES (notify/protocol/latency.py) of the last whole minute of a topic or group, by `{kind}_{share}`."""
        found = ((kind, self.kinds[kind].minute(name)) for kind in kinds)
        return {
            f"{kind}_{share}": seconds
            for kind, counts in found
            if counts is not None
            for share, seconds in shares(counts).items()
        }

    def turn(self) -> None:
        """End a minute."""
        for histograms in self.kinds.values():
            histograms.turn()
