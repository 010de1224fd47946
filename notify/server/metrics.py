"""The core's counters as plain numbers, and the text in which /metrics shows them to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from notify.protocol.latency import BOUNDS, Histogram
from notify.server.latency import Exemplar as Kept
from notify.server.latency import Latencies, Latency


@dataclass(slots=True)
class Metrics:
    """Monotone counters since the process started, and how long things took."""

    halves: int = 0
    committed: int = 0
    rolled_back: int = 0
    conflicts: int = 0
    published: int = 0
    checks_sent: int = 0
    checks_answered: int = 0
    checks_unavailable: int = 0
    parked: int = 0
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    dead_lettered: int = 0
    held: int = 0
    filtered: int = 0
    expired: int = 0
    leases_expired: int = 0
    interrupted: int = 0
    answers_repeated: int = 0
    scheduled: int = 0
    schedule_missed: int = 0
    refused_rate: int = 0
    refused_backlog: int = 0
    refused_full: int = 0
    latencies: Latencies = field(default_factory=Latencies)


HELP = {
    "halves": "Half messages stored",
    "committed": "Transactions committed",
    "rolled_back": "Transactions rolled back",
    "conflicts": "Outcomes refused because the opposite one is recorded",
    "published": "Messages stored without a transaction",
    "checks_sent": "Checks handed to producers",
    "checks_answered": "Checks that a producer answered with UNKNOWN",
    "checks_unavailable": "Checks that a producer could not answer",
    "parked": "Transactions parked after their checks ran out",
    "delivered": "Messages handed to consumers",
    "redelivered": "Messages handed to consumers again",
    "acked": "Messages acknowledged",
    "dead_lettered": "Messages moved to a dead-letter queue",
    "held": 'Messages that used up their attempts and hold their key (`on_exhausted="hold"`)',
    "filtered": "Messages skipped by a subscription's tags or filter",
    "expired": "Messages that a group skipped: past their time to live, a backlog's bound or the retention",
    "refused_rate": "Transactions and messages refused by a rate limit",
    "refused_backlog": "Transactions and messages refused because a topic's backlog is full",
    "leases_expired": "Messages whose lease ran out",
    "interrupted": "Messages that a stopping consumer had not settled: no attempt counts",
    "answers_repeated": "Requests to receive that came again because their answer was lost, and got the same messages",
    "scheduled": "Messages sent by schedules",
    "schedule_missed": "Instants of schedules that were left out because they could not be sent in time",
    "refused_full": "Requests refused because the disk is full",
}

COUNTERS = tuple(f.name for f in fields(Metrics) if f.name in HELP)


Labelled = Iterable[tuple[tuple[str, ...], float]]
"""Samples of a metric: the values of the labels, and the value of the sample."""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST
LE = [*map(str, BOUNDS), "+Inf"]
"""The label `le` of each bucket."""


class Exposition:
    """The text of `/metrics`, gathered metric by metric. prometheus-client writes it, and escapes the names in labels,
    which may have any characters."""

    def __init__(self, metrics: Metrics) -> None:
        self._families: list[Metric] = [
            CounterMetricFamily(f"notify_{name}", HELP[name], getattr(metrics, name)) for name in COUNTERS
        ]

    def counter(self, name: str, text: str, value: float) -> None:
        """Add a counter of one sample; `name` without `_total`."""
        self._families.append(CounterMetricFamily(name, text, value))

    def counters(self, name: str, text: str, labels: Sequence[str], samples: Labelled) -> None:
        """Add a counter with a sample for each value of its labels; `name` without `_total`."""
        family = CounterMetricFamily(name, text, labels=labels)
        for values, value in samples:
            family.add_metric(values, value)
        self._families.append(family)

    def gauge(self, name: str, text: str, value: float) -> None:
        """Add a metric of one sample."""
        self._families.append(GaugeMetricFamily(name, text, value))

    def gauges(self, name: str, text: str, labels: Sequence[str], samples: Labelled) -> None:
        """Add a metric with a sample for each value of its labels."""
        family = GaugeMetricFamily(name, text, labels=labels)
        for values, value in samples:
            family.add_metric(values, value)
        self._families.append(family)

    def histograms(self, name: str, text: str, label: str, samples: Iterable[tuple[str, Histogram]]) -> None:
        """Add a histogram of durations for each value of its label, with the exemplars that it has."""
        family = HistogramMetricFamily(name, text, labels=[label])
        for value, histogram in samples:
            exemplars = (isinstance(histogram, Latency) and histogram.exemplars) or {}
            cumulated = enumerate(accumulate(histogram.counts))
            buckets = [_bucket(LE[number], count, exemplars.get(number)) for number, count in cumulated]
            family.add_metric([value], buckets, histogram.sum_us / 1e6)
        self._families.append(family)

    def collect(self) -> list[Metric]:
        """The metrics gathered so far; prometheus-client calls this on a collector."""
        return self._families

    def text(self, kind: str = PLAIN) -> str:
        """The metrics in a content type, PLAIN or OPENMETRICS; only the latter has exemplars."""
        registry = CollectorRegistry()
        registry.register(self)
        if kind == OPENMETRICS:
            return str(openmetrics.generate_latest(registry), "utf-8")  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()


def kind_for(accept: str) -> str:
    """The content type for a request's header `Accept`: OPENMETRICS if that names it, as Prometheus does."""
    accepted = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    return OPENMETRICS if OPENMETRICS.partition(";")[0] in accepted else PLAIN


def _bucket(le: str, count: int, exemplar: Kept | None) -> tuple[str, float] | tuple[str, float, Exemplar]:
    """A bucket as prometheus-client takes it."""
    if exemplar is None:
        return le, count
    return le, count, Exemplar({"trace_id": exemplar.trace_id}, exemplar.us / 1e6, exemplar.at_us / 1e6)
