"""Latencies of /metrics and those that people are shown, to compare both."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client.parser import text_string_to_metric_families

from notify.protocol.latency import BOUNDS
from tests.support.http import call

UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def counts(url: str, kind: str, label: str) -> list[int]:
    """The counts of a histogram's buckets in /metrics; empty if there is none."""
    cumulated: list[float] = []
    for family in text_string_to_metric_families(str(call(url, "GET", "/metrics"))):
        if family.name == f"notify_{kind}_seconds":
            cumulated = [s.value for s in family.samples if s.name.endswith("_bucket") and label in s.labels.values()]
    return [round(now - before) for now, before in zip(cumulated, [0.0, *cumulated], strict=False)]


def bucket(seconds: float | None) -> int:
    """The number of the bucket that counts a duration."""
    assert seconds is not None
    return bisect_left(BOUNDS, seconds)


def seconds_of(text: str) -> float:
    """The duration that people read as `42.3 ms`, `1.25 s` or `2 min`."""
    number, unit = text.split()
    return float(number) * UNITS[unit]
