"""Percentiles of latencies counted in logarithmic bins."""

from __future__ import annotations

from collections.abc import Iterable

STEPS = 4
"""Bins for each doubling; a percentile is right to within 19 %."""


def percentile(bins: Iterable[tuple[int, int]], share: float) -> float | None:
    """Seconds below which `share` of the values lie; bins are (bin, count), bin = floor(log2(microseconds) * STEPS)."""
    ordered = sorted(bins)
    total = sum(count for _, count in ordered)
    if not total:
        return None
    seen = 0
    for number, count in ordered:
        seen += count
        if seen >= share * total:
            return float(2 ** ((number + 0.5) / STEPS)) / 1e6
    return None


def merged(rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bins of several histograms, added."""
    counts: dict[int, int] = {}
    for number, count in rows:
        counts[number] = counts.get(number, 0) + count
    return sorted(counts.items())


def shown(seconds: float | None) -> str:
    """A duration in seconds as text, for people."""
    if seconds is None:
        return "–"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
