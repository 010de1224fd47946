"""Percentiles of latencies that were counted in steps of a fraction of a doubling."""

from __future__ import annotations

from collections.abc import Iterable

STEPS = 4
"""Bins in a doubling: a percentile is right to within 19 %."""


def percentile(bins: Iterable[tuple[int, int]], share: float) -> float | None:
    """Seconds below which `share` of the values lie, of (bin, count) with bin = floor(log2(microseconds) * STEPS)."""
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
    """Bins of several histograms as one."""
    found: dict[int, int] = {}
    for number, count in rows:
        found[number] = found.get(number, 0) + count
    return sorted(found.items())


def shown(seconds: float | None) -> str:
    """A duration as people read it."""
    if seconds is None:
        return "–"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
