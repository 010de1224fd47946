"""How long something took, counted in buckets: the bounds that servers and clients share, and the text of a report.

A consumer sends what its handlers took with a settlement, in the query: a server that does not know the parameters
ignores them, and a client that does not measure leaves them out.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from notify.protocol.limits import digits

BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
)  # fmt: skip
"""The upper bounds of the buckets, in seconds; a last bucket has what took longer. A report names a bucket by its
number, so other bounds need other parameters of the query."""
BOUNDS_US = tuple(round(bound * 1_000_000) for bound in BOUNDS)
BUCKETS = len(BOUNDS) + 1
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""The shares that people are shown, by name."""

WAITED = "waited"
"""The parameter of a settlement: how long messages waited in the consumer's hands before their handlers began."""
HANDLED = "handled"
"""The parameter of a settlement: how long handlers took."""
SLOWEST = "slowest"
"""The parameter of a settlement: the slowest handler call of a message with a sampled trace, as `written_slowest`."""
_MOST_COUNT = 9
"""The most digits of a count in a report."""
_TRACE = re.compile("[0-9a-f]{32}")


class Histogram:
    """Counts of durations by bucket, and their sum. It never grows."""

    __slots__ = ("counts", "sum_us")

    def __init__(self) -> None:
        self.counts = array("Q", bytes(8 * BUCKETS))
        self.sum_us = 0

    def add(self, us: int, count: int = 1) -> None:
        """Count `count` durations of `us` microseconds each; a negative one (a clock was set back) counts as 0."""
        self.counts[bisect_left(BOUNDS_US, us)] += count
        if us > 0:
            self.sum_us += us * count

    def add_all_of(self, seconds: Sequence[float]) -> None:
        """Count durations in seconds. The work for each of them is a sort's, and mostly they lie in few buckets."""
        ordered = sorted(seconds)
        first, end = 0, len(ordered)
        while first < end:
            bucket = bisect_left(BOUNDS, ordered[first])
            behind = end if bucket == len(BOUNDS) else bisect_right(ordered, BOUNDS[bucket], first)
            self.counts[bucket] += behind - first
            first = behind
        self.sum_us += max(0, round(sum(ordered) * 1e6))

    def add_ages(self, now_us: int, times: Sequence[int], total_us: int) -> None:
        """Count the time from each of `times` (microseconds since 1970, the oldest first) until now. `total_us`: their
        sum. The work does not grow with the number of times."""
        count = len(times)
        high = bisect_left(BOUNDS_US, now_us - times[0])
        low = bisect_left(BOUNDS_US, now_us - times[-1])
        end = count
        for bucket in range(low, high):
            first = bisect_left(times, now_us - BOUNDS_US[bucket], 0, end)
            self.counts[bucket] += end - first
            end = first
        self.counts[max(low, high)] += end
        self.sum_us += max(0, now_us * count - total_us)

    def add_all(self, other: Histogram) -> None:
        """Count what another histogram has counted."""
        for bucket, count in enumerate(other.counts):
            if count:
                self.counts[bucket] += count
        self.sum_us += other.sum_us


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The duration, in seconds, within which `share` (0 to 1) of the counted ones lie; None if none is counted.

    It is interpolated within its bucket, as Prometheus' `histogram_quantile` does; beyond the last bound it is that
    bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, before = share * total, 0
    for bucket, count in enumerate(counts):
        if count and before + count >= rank:
            if bucket == len(BOUNDS):
                break
            low = BOUNDS[bucket - 1] if bucket else 0.0
            return low + (BOUNDS[bucket] - low) * max(0.0, rank - before) / count
        before += count
    return BOUNDS[-1]


def shares(counts: Sequence[int]) -> dict[str, float | None]:
    """The durations of SHARES, in seconds to the microsecond."""
    durations = {name: quantile(counts, share) for name, share in SHARES.items()}
    return {name: None if seconds is None else round(seconds, 6) for name, seconds in durations.items()}


def shown(counts: Sequence[int]) -> dict[str, Any]:
    """Counts as admin routes and reports show them: how many, and the SHARES in seconds, None if none is counted."""
    return {"count": sum(counts)} | shares(counts)


def share_within(counts: Sequence[int], seconds: float) -> float | None:
    """The share (0 to 1) of the counted durations that are at most so long, interpolated as in `quantile`; None if none
    is counted. What took longer than the last bound counts as longer than any `seconds`."""
    total = sum(counts)
    if not total:
        return None
    within, low = 0.0, 0.0
    for bound, count in zip(BOUNDS, counts, strict=False):
        if seconds < bound:
            within += count * max(0.0, seconds - low) / (bound - low)
            break
        within += count
        low = bound
    return within / total


def written(histogram: Histogram) -> str:
    """A histogram as the value of a parameter: the sum in microseconds, then `bucket.count` of buckets with a count."""
    parts = [f"{bucket}.{count}" for bucket, count in enumerate(histogram.counts) if count]
    return "_".join([str(histogram.sum_us), *parts])


def parsed(text: str) -> Histogram | None:
    """The histogram that `written` wrote; None for another text: a settlement is not refused because of its report."""
    sum_text, *parts = text.split("_", BUCKETS)
    sum_us = digits(sum_text, 18)
    if sum_us is None:
        return None
    histogram = Histogram()
    histogram.sum_us = sum_us
    for part in parts:
        bucket_text, _, count_text = part.partition(".")
        bucket, count = digits(bucket_text, 2), digits(count_text, _MOST_COUNT)
        if bucket is None or count is None or bucket >= BUCKETS:
            return None
        histogram.counts[bucket] += count
    return histogram


def written_slowest(us: int, trace_id: str) -> str:
    """The value of SLOWEST: a duration in microseconds, and the trace of its message (32 hexadecimal digits)."""
    return f"{us}.{trace_id}"


def parsed_slowest(text: str) -> tuple[int, str] | None:
    """The duration and the trace that `written_slowest` wrote; None for another text."""
    us_text, _, trace_id = text.partition(".")
    us = digits(us_text, 18)
    return None if us is None or not _TRACE.fullmatch(trace_id) else (us, trace_id)
