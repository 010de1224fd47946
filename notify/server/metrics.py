"""Counters of the core as plain numbers; /metrics renders them for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Metrics:
    """Monotone counters since the process started."""

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
    filtered: int = 0
    expired: int = 0
    leases_expired: int = 0
    refused_rate: int = 0
    refused_backlog: int = 0
    refused_full: int = 0


HELP = {
    "halves": "Half messages stored",
    "committed": "Transactions committed",
    "rolled_back": "Transactions rolled back",
    "conflicts": "Outcomes refused because the opposite one is recorded",
    "published": "Messages stored without a transaction",
    "checks_sent": "Checks handed to producers",
    "checks_answered": "Checks answered UNKNOWN by a producer that could look",
    "checks_unavailable": "Checks that a producer could not answer",
    "parked": "Transactions parked after their checks ran out",
    "delivered": "Messages handed to consumers",
    "redelivered": "Messages handed to consumers again",
    "acked": "Messages acknowledged",
    "dead_lettered": "Messages moved to a dead-letter queue",
    "filtered": "Messages skipped by a subscription's tags or filter",
    "expired": "Messages that a group passed over: their time to live, a backlog's bound or the retention was over",
    "refused_rate": "Transactions and messages refused by a rate limit",
    "refused_backlog": "Transactions and messages refused because a topic's backlog is full",
    "leases_expired": "Messages whose lease ran out",
    "refused_full": "Requests refused because the disk is full",
}


def render(metrics: Metrics, gauges: dict[str, tuple[str, float]]) -> str:
    """Prometheus text: the counters, then gauges (name to help and value)."""
    lines = []
    for f in fields(metrics):
        name = f"notify_{f.name}_total"
        lines += [f"# HELP {name} {HELP[f.name]}", f"# TYPE {name} counter", f"{name} {getattr(metrics, f.name)}"]
    for name, (text, value) in gauges.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value:g}"]
    return "\n".join(lines) + "\n"
