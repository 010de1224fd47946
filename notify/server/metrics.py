"""The core's counters as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from notify.server.latency import Latencies


@dataclass(slots=True)
class Metrics:
    """Monotone counters since the process started, and how long things took."""

    halves: int = 0
    committed: int = 0
    rolled_back: int = 0
    conflicts: int = 0
    published: int = 0
    checks_sent: int = 0
    checks_unknown: int = 0
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
    "checks_unknown": "Checks that a producer answered with UNKNOWN",
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
