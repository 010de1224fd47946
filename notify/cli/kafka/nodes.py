"""Checks whether each broker answers at its advertised address, and whether its settings keep Notify's guarantees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import confluent_kafka

from notify.cli.kafka.line import Level, Line, holds, named
from notify.cli.kafka.seen import Seen
from notify.client.kafka.feed import SESSION_SECONDS
from notify.kafka.diagnosis import why_silent
from notify.movers.sinks.kafka import TRANSACTION_SECONDS

MINUTE_MS, DAY_MS = 60_000, 86_400_000
OFFSETS_MINUTES = 7 * 24 * 60
METADATA_BYTES = 4096


class Wanted(NamedTuple):
    """A setting of brokers that is checked. `remedy`: what to do if its value is bad."""

    name: str
    is_good: Callable[[str, Seen], bool]
    level: Level
    remedy: str


WANTED = (
    Wanted(
        "transaction.max.timeout.ms", lambda v, _: int(v) >= TRANSACTION_SECONDS * 1000, "fail",
        f"bridges and relays cannot publish: set it to {TRANSACTION_SECONDS * 1000:.0f} or more",
    ),
    Wanted(
        "transactional.id.expiration.ms", lambda v, _: int(v) >= DAY_MS, "warn",
        f"a publisher that was frozen for longer is not fenced: set it to {DAY_MS} (a day) or more",
    ),
    Wanted(
        "offsets.retention.minutes", lambda v, _: int(v) >= OFFSETS_MINUTES, "warn",
        "a group whose consumers are all down for longer loses its offsets and starts over: set it to "
        f"{OFFSETS_MINUTES} (a week) or more",
    ),
    Wanted(
        "offset.metadata.max.bytes", lambda v, _: int(v) >= METADATA_BYTES, "fail",
        f"consumers cannot commit: set it to {METADATA_BYTES} or more",
    ),
    Wanted(
        "group.min.session.timeout.ms", lambda v, _: int(v) <= SESSION_SECONDS * 1000, "fail",
        f"consumers and releases of delayed messages cannot join: set it to {SESSION_SECONDS * 1000} or less",
    ),
    Wanted(
        "auto.create.topics.enable", lambda v, _: v != "true", "warn",
        "another client's mistyped topic is made: Notify makes its topics itself, so set it to false",
    ),
    Wanted(
        "default.replication.factor", lambda v, seen: int(v) > 1 or len(seen.brokers) < 3, "warn",
        "topics that are made get one copy: set it to 3",
    ),
    Wanted(
        "offsets.topic.replication.factor", lambda v, seen: int(v) > 1 or len(seen.brokers) < 3, "warn",
        "no group can continue while the broker of its offsets is down: set it to 3",
    ),
    Wanted(
        "transaction.state.log.replication.factor", lambda v, seen: int(v) > 1 or len(seen.brokers) < 3, "warn",
        "nothing can be published while the broker of its transactions is down: set it to 3",
    ),
    Wanted(
        "unclean.leader.election.enable", lambda v, _: v != "true", "warn",
        "a copy that lacks messages may become the leader, and they are lost: set it to false",
    ),
)  # fmt: skip


def lines(seen: Seen) -> Iterator[Line]:
    yield from _reached(seen)
    count = len(seen.brokers)
    if seen.controller < 0:
        yield Line("controller", "fail", "none is known: look whether a majority of the controllers runs")
    else:
        yield Line("controller", "ok", f"node {seen.controller}; {count} brokers")
    client = confluent_kafka.libversion()[0]
    yield Line("versions", "ok", f"Kafka's client is librdkafka {client}; brokers do not report their version to it")
    yield from _settings(seen)


def _reached(seen: Seen) -> Iterator[Line]:
    """A line for each broker, about the address that it directs clients to."""
    for number, address in sorted(seen.brokers.items()):
        if (why := why_silent(seen.cluster, address)) is None:
            yield Line("broker", "ok", f"{number} answers at {address}")
        else:
            yield Line("broker", "fail", f"{number}: {why}")


def _settings(seen: Seen) -> Iterator[Line]:
    if not seen.settings:
        yield Line("settings", "unknown", "grant DescribeConfigs on the cluster to have the brokers' settings checked")
        return
    for wanted in WANTED:
        values = {
            number: settings[wanted.name] for number, settings in seen.settings.items() if wanted.name in settings
        }
        bad = {f"{number} has {value}" for number, value in values.items() if not holds(wanted.is_good, value, seen)}
        if bad:
            yield Line(wanted.name, wanted.level, f"broker {named(bad)}: {wanted.remedy}")
        elif values:
            yield Line(wanted.name, "ok", ", ".join(sorted(set(values.values()))))
