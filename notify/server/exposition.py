"""The text in which /metrics shows the server's figures to Prometheus."""

from __future__ import annotations

import contextlib
import heapq
import resource
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from notify.errors import Unavailable, WrongRole
from notify.protocol.latency import BOUNDS, Histogram
from notify.protocol.withdrawal import Fate
from notify.runtime import faults
from notify.runtime.threads import in_thread
from notify.server.cluster.workers import DIED, HUNG
from notify.server.connections.quota import Connections
from notify.server.core.core import Core
from notify.server.data_directory import room_of
from notify.server.groups import own_tenants
from notify.server.latency import KINDS, Latency
from notify.server.latency import Exemplar as Kept
from notify.server.metrics import COUNTERS, HELP, Metrics
from notify.server.running import Running
from notify.server.schedules.schedule import STATES
from notify.server.schedules.schedules import Schedules
from notify.server.shipping import Shipping
from notify.server.watch.alarm import MEANING
from notify.server.watch.alarms import Alarms
from notify.server.watch.group_state import GroupState

BUSIEST_TOPICS = 100
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
        self._add(CounterMetricFamily(name, text, labels=labels), samples)

    def gauge(self, name: str, text: str, value: float) -> None:
        """Add a metric of one sample."""
        self._families.append(GaugeMetricFamily(name, text, value))

    def gauges(self, name: str, text: str, labels: Sequence[str], samples: Labelled) -> None:
        """Add a metric with a sample for each value of its labels."""
        self._add(GaugeMetricFamily(name, text, labels=labels), samples)

    def _add(self, family: CounterMetricFamily | GaugeMetricFamily, samples: Labelled) -> None:
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


async def text_of(running: Running, connections: Connections, kind: str = PLAIN) -> str:
    """The text of `/metrics`: every metric with its value now, in a content type."""
    core = running.core
    now_us = core.clock()
    disk = await in_thread(room_of, core.settings.data_dir)
    doubt = await core.store.in_doubt()
    exposition = Exposition(core.metrics)
    exposition.counter(
        "notify_unexpected_errors", "Faults of the server itself; its log has each traceback", faults.count()
    )
    exposition.gauge(
        "notify_oldest_undecided_seconds",
        "Age of the oldest undecided transaction that is not parked",
        (now_us - doubt.oldest_us) / 1e6 if doubt.oldest_us else 0,
    )
    exposition.gauge("notify_parked_transactions", "Parked transactions (SQL storage counts up to 1000)", doubt.parked)
    exposition.gauge("notify_topics", "Topics", len(core.store.topics()))
    exposition.gauge("notify_disk_free_bytes", "Free room on the disk of the log", disk.free)
    exposition.gauge("notify_disk_size_bytes", "Size of the disk of the log", disk.total)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    exposition.gauge("notify_resident_bytes", "Largest resident size of the process", resident)
    exposition.gauge("notify_connections", "Open connections", connections.count)
    exposition.gauge("notify_connections_most", "The most connections at once", connections.most)
    exposition.gauge(
        "notify_connections_turned_away",
        "Connections and requests that got no place",
        connections.turned_away,
    )
    with contextlib.suppress(Unavailable, WrongRole):  # an alarm says that Kafka does not answer
        _add_groups(exposition, await running.queues.groups.states(), now_us)
        letters = [((row["group"],), row["count"]) for row in await running.queues.letters.counted("", BUSIEST_TOPICS)]
        exposition.gauges("notify_dead_letters", "Dead letters of the groups with the most", ["group"], letters)
        _add_refused(exposition, await running.queues.groups.refused())
        _add_sources(exposition, await running.queues.groups.sources())
    if core.has_queues:
        _add_queues(exposition, core)
    _add_left_behind(exposition, core.left_behind.shown())
    if running.shipping is not None:
        _add_shipping(exposition, running.shipping)
    if running.workers is not None:
        counts = running.workers.ended.counts
        text = "How often a worker was started again since its server's start, by what had ended it"
        exposition.counters(
            "notify_worker_restarts", text, ["why"], [((why,), counts.get(why, 0)) for why in (DIED, HUNG)]
        )
    _add_schedules(exposition, running.schedules, now_us)
    _add_alarms(exposition, running.alarms)
    for measured in KINDS:
        samples = core.metrics.latencies[measured.name].samples()
        exposition.histograms(f"notify_{measured.name}_seconds", measured.text, measured.label, samples)
    return exposition.text(kind)


def _add_alarms(exposition: Exposition, alarms: Alarms) -> None:
    raised = Counter(alarm.name for alarm in alarms.heard())
    exposition.gauges(
        "notify_alarms",
        "Raised alarms by name; see the operating guide",
        ["alarm"],
        [((name,), raised[name]) for name in MEANING],
    )


def _add_shipping(exposition: Exposition, shipping: Shipping) -> None:
    segments, size, seconds = shipping.behind()
    exposition.gauge("notify_shipping_behind_segments", "Finished segments that the store does not list", segments)
    exposition.gauge("notify_shipping_behind_bytes", "Bytes of the log that the store does not list", size)
    exposition.gauge("notify_shipping_behind_seconds", "Time whose writes would be lost with the disk", seconds)
    exposition.gauge("notify_shipping_listed_segments", "Segments that the store lists", shipping.standing.segments)
    exposition.counter("notify_shipping_bytes", "Bytes of the segments that were listed", shipping.shipped_bytes)
    exposition.counter("notify_shipping_failures", "Tries to ship that failed", shipping.failures)
    exposition.counter(
        "notify_shipping_unreadable", "Messages without a readable payload in shipped tables", shipping.unreadable
    )


def _add_groups(exposition: Exposition, groups: Sequence[GroupState], now_us: int) -> None:
    exposition.gauge("notify_groups", "Consumer groups", len(groups))
    # Operators raise alarms on the number of slow and stuck consumers.
    in_state: Counter[str] = Counter()
    for group in groups:
        in_state.update(group.consumers)
    consumers = [((state,), in_state[state]) for state in ("ok", "slow", "stuck", "gone")]
    exposition.gauges("notify_consumers", "Consumers by state", ["state"], consumers)
    held = heapq.nlargest(BUSIEST_TOPICS, [group for group in groups if group.held], key=lambda group: group.held)
    counts = [((group.name,), group.held) for group in held]
    exposition.gauges("notify_held_keys", "Held keys of the groups with the most", ["group"], counts)
    ages = [((group.name,), max(0, now_us - group.held_since_us) / 1e6) for group in held]
    text = "How long the first of a group's held keys has been held"
    exposition.gauges("notify_held_key_oldest_seconds", text, ["group"], ages)
    lags = [((group.name, topic), lag) for group in groups for topic, lag in group.lags.items()]
    most = heapq.nlargest(BUSIEST_TOPICS, lags, key=lambda row: row[1])
    exposition.gauges("notify_lag_messages", "Messages not settled yet", ["group", "topic"], most)


def _add_queues(exposition: Exposition, core: Core) -> None:
    leased = sum(g.in_flight() for g in core.delivery.groups.values())
    exposition.gauge("notify_leased_messages", "Messages under a lease", leased)
    fates = core.queues.withdrawals()
    exposition.counters(
        "notify_withdrawals",
        "Withdrawals of delayed messages since the start, by what became of them",
        ["outcome"],
        [((fate.name,), fates.get(fate, 0)) for fate in Fate if fate is not Fate.WAITING],
    )
    text = "Messages that were collapsed into another one of their dedupe key, or that a later one replaced"
    exposition.counter("notify_collapsed", text, core.queues.collapsed())
    exposition.gauge("notify_delayed_messages", "Delayed messages that are not due yet", core.queues.delayed())
    groups = core.delivery.groups.values()
    shares = [((group.name, share.topic), share) for group in groups for share in own_tenants.shares(group)]
    most = heapq.nlargest(BUSIEST_TOPICS, shares, key=lambda row: row[1].waiting)
    for name, field, text in (
        ("notify_waiting_tenants", "tenants", "Tenants that wait for their turns (`fair_by`)"),
        ("notify_largest_tenant_share", "largest", "The largest tenant's part of the messages that wait for turns"),
    ):
        samples = [(labels, getattr(share, field)) for labels, share in most]
        exposition.gauges(name, text, ["group", "topic"], samples)


def _add_refused(exposition: Exposition, refused: Sequence[Mapping[str, Any]]) -> None:
    waiting = [((row["source"],), row["waiting"]) for row in refused]
    text = "Refused transactions of a source that wait for a decision"
    exposition.gauges("notify_refused_transactions", text, ["source"], waiting)


def _add_left_behind(exposition: Exposition, reports: Sequence[Mapping[str, Any]]) -> None:
    for name, field, text in (
        ("notify_left_behind_transactions", "transactions", "Transactions that a group in mode auto has left behind"),
        ("notify_left_behind_seconds", "seconds", "Time since the oldest of them was left behind"),
    ):
        samples = [((row["source"], row["producer_group"]), row[field]) for row in reports]
        exposition.gauges(name, text, ["source", "producer_group"], samples)


def _add_schedules(exposition: Exposition, schedules: Schedules, now_us: int) -> None:
    own = schedules.own()
    states = Counter(schedule.state(now_us) for schedule in own)
    exposition.gauges("notify_schedules", "Schedules that this server may send, by state", ["state"],
        [((state,), states[state]) for state in STATES])  # fmt: skip
    active = [s for s in own if s.next_us and not s.paused]
    soonest = heapq.nsmallest(BUSIEST_TOPICS, active, key=lambda s: s.next_us)
    text = "Time until a schedule's next instant, of the first 100; below 0: it is late"
    samples = [((s.name,), (s.next_us - now_us) / 1e6) for s in soonest]
    exposition.gauges("notify_schedule_next_seconds", text, ["schedule"], samples)
    last = heapq.nlargest(BUSIEST_TOPICS, [s for s in own if s.last_sent_us], key=lambda s: s.last_sent_us)
    for name, text, values in (
        ("notify_schedule_last_sent_seconds", "Time since a schedule's last message, of the last 100 that sent",
            [(now_us - s.last_sent_us) / 1e6 for s in last]),
        ("notify_schedule_lag_seconds", "How long after its instant that message was sent",
            [(s.last_sent_us - s.last_instant_us) / 1e6 for s in last]),
    ):  # fmt: skip
        exposition.gauges(name, text, ["schedule"], [((s.name,), v) for s, v in zip(last, values, strict=True)])


def _add_sources(exposition: Exposition, sources: Sequence[Mapping[str, Any]]) -> None:
    # Operators raise alarms on a bridge that lags, and on one that is silent: it writes at least every 10 s.
    for name, field, text in (
        (
            "notify_bridge_lag_seconds",
            "lag_seconds",
            "Time from commit in the source to append, of the newest row",
        ),
        ("notify_bridge_silent_seconds", "silent_seconds", "Time since a bridge last wrote; a stalled one is above 30"),
        ("notify_bridge_transactions", "rows", "Transactions taken over from a source"),
        ("notify_bridge_refused", "refused", "Transactions of a source that no queue could take"),
        ("notify_bridge_retained_bytes", "retained_bytes", "WAL that PostgreSQL keeps for its bridge"),
        (
            "notify_bridge_retained_left_bytes",
            "retained_left_bytes",
            "WAL that PostgreSQL can still write before it drops its bridge's slot",
        ),
        (
            "notify_bridge_slot_age_transactions",
            "slot_age_transactions",
            "How many transactions old the oldest is whose catalogue rows a PostgreSQL keeps for its bridge",
        ),
    ):
        samples = [((row["source"],), row[field]) for row in sources if row.get(field) is not None]
        exposition.gauges(name, text, ["source"], samples)
