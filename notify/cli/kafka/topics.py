"""Checks whether topics keep their records, and whether each partition has a leader and all its copies now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from notify.cli.kafka.line import Level, Line, holds, named
from notify.cli.kafka.seen import Seen
from notify.client.kafka.topics import RETRY_KEPT_MS
from notify.kafka import control, redriven, refusals, subscriptions, undelivered
from notify.kafka.brokers import COMPACTED as CONFIG
from notify.kafka.groups import DEAD_LETTER, RETRY
from notify.kafka.records import DELAYED, POSITIONS
from notify.kafka.topics import LARGEST_RECORD
from notify.movers.sinks.delays.wheels import WHEELS
from notify.protocol.limits import digits

COMPACTED = (
    POSITIONS, control.TOPIC, subscriptions.TOPIC, redriven.TOPIC, refusals.REFUSED.topic, undelivered.DECISIONS.topic,
)  # fmt: skip
SOME_BROKERS = 3
"""From this number of brokers on, topics should have several copies."""


class Rule(NamedTuple):
    """A rule for a setting of topics whose names begin with one of `beginnings`; without any: of topics of messages."""

    setting: str
    kind: str
    beginnings: tuple[str, ...]
    is_good: Callable[[str], bool]
    level: Level
    remedy: str


WHEELS_TOPICS = f"{DELAYED}."
ALTER = "kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name TOPIC --add-config "
KEEPS_ALL = (
    "made by an earlier version, it keeps a week of records, which each start reads: "
    + ALTER
    + ",".join(f"{name}={value}" for name, value in CONFIG.items())
)
RULES = (
    Rule(
        "cleanup.policy", "positions and orders", COMPACTED, lambda v: v == "compact", "fail",
        "they are deleted by their age: set it to compact",
    ),
    Rule(
        "segment.ms", "positions and orders", COMPACTED, lambda v: int(v) <= int(CONFIG["segment.ms"]), "warn",
        KEEPS_ALL,
    ),
    Rule(
        "segment.bytes", "positions and orders", COMPACTED, lambda v: int(v) <= int(CONFIG["segment.bytes"]), "warn",
        KEEPS_ALL,
    ),
    Rule(
        "cleanup.policy", "what waits", (WHEELS_TOPICS, DEAD_LETTER, RETRY), lambda v: v == "delete", "fail",
        "of messages with one key all but the last are deleted: set it to delete",
    ),
    Rule(
        "retention.ms", "delays", (WHEELS_TOPICS,), lambda v: v == "-1", "fail",
        "delayed messages are deleted before they are due: set it to -1",
    ),
    Rule(
        "retention.ms", "dead letters", (DEAD_LETTER,), lambda v: v == "-1", "warn",
        "they are deleted by their age: set it to -1",
    ),
    Rule(
        "retention.ms", "retries", (RETRY,), lambda v: v == "-1" or int(v) >= RETRY_KEPT_MS, "warn",
        f"messages that wait for a retry are deleted by their age: set it to {RETRY_KEPT_MS} or -1",
    ),
    Rule(
        "retention.bytes", "what waits", (WHEELS_TOPICS, DEAD_LETTER, RETRY), lambda v: v == "-1", "warn",
        "the oldest messages are deleted where many wait: set it to -1",
    ),
    Rule(
        "cleanup.policy", "messages", (), lambda v: v == "delete", "warn",
        "of a key's messages all but the last are deleted, perhaps before a group has handled them, and those without "
        "a key are refused: set it to delete",
    ),
    Rule(
        "max.message.bytes", "messages", (), lambda v: int(v) >= LARGEST_RECORD, "warn",
        f"larger messages are refused: set it to {LARGEST_RECORD}",
    ),
    Rule(
        "unclean.leader.election.enable", "all topics", ("",), lambda v: v != "true", "warn",
        "a copy that lacks messages may become the leader, and they are lost: set it to false",
    ),
)  # fmt: skip


def lines(seen: Seen) -> Iterator[Line]:
    yield Line("topics", "ok", f"{len(seen.message_topics())} of messages, {len(seen.own_topics())} of Notify's own")
    yield from _present(seen)
    yield from _leaders(seen)
    yield from _copies(seen)
    hidden = seen.topics.keys() - seen.configs.keys()
    if hidden:
        yield Line("topic settings", "unknown", f"grant DescribeConfigs on {named(hidden)}")
    for rule in RULES:
        yield from _ruled(seen, rule)


def _present(seen: Seen) -> Iterator[Line]:
    wheels = {wheel.topic: wheel.slots for wheel in WHEELS.wheels}
    missing = wheels.keys() - seen.topics.keys()
    few = {
        f"{name} has {len(seen.topics[name].partitions)} of {slots}"
        for name, slots in wheels.items()
        if name not in missing and len(seen.topics[name].partitions) < slots
    }
    if few:
        yield Line("delays", "fail", f"too few partitions, no bridge can publish: {named(few)}; add partitions")
    elif missing:
        yield Line("delays", "ok", "their topics are made by the first bridge or relay")
    else:
        yield Line("delays", "ok", f"{len(wheels)} topics with all their partitions")


def _leaders(seen: Seen) -> Iterator[Line]:
    partitions = {f"{name}/{n}": p for name, topic in seen.topics.items() for n, p in topic.partitions.items()}
    offline = [place for place, p in partitions.items() if p.leader < 0]
    if offline:
        yield Line("leaders", "fail", f"{len(offline)} partitions have none, start their brokers: {named(offline)}")
    else:
        yield Line("leaders", "ok", f"{len(partitions)} partitions have one")
    behind = [place for place, p in partitions.items() if len(p.isrs) < len(p.replicas)]
    if behind:
        yield Line("copies", "warn", f"{len(behind)} partitions lack some: look at their brokers: {named(behind)}")
    else:
        yield Line("copies", "ok", "all are in step")


def _copies(seen: Seen) -> Iterator[Line]:
    factors = {name: min(len(p.replicas) for p in topic.partitions.values()) for name, topic in seen.topics.items()}
    alone = [name for name, copies in factors.items() if copies == 1]
    if alone and len(seen.brokers) >= SOME_BROKERS:
        text = f"one copy only, which is lost with its broker, reassign them to three: {named(alone)}"
        yield Line("replication", "warn", text)
    elif factors:
        yield Line("replication", "ok", f"at least {min(factors.values())} on {len(seen.brokers)} brokers")
    least = {n: number for n in factors if (number := digits(seen.setting("min.insync.replicas", n))) is not None}
    few = [name for name, n in least.items() if factors[name] >= SOME_BROKERS and n < 2]
    tight = [name for name, n in least.items() if 1 < factors[name] <= n]
    if few:
        text = f"1, so what one broker alone has may be lost: set it to 2 for {named(few)}"
        yield Line("min.insync.replicas", "warn", text)
    if tight:
        text = f"as many as copies, so writing stops while one broker is down: set it to one less for {named(tight)}"
        yield Line("min.insync.replicas", "warn", text)
    if least and not few and not tight:
        yield Line("min.insync.replicas", "ok", "fits the number of copies")


def _ruled(seen: Seen, rule: Rule) -> Iterator[Line]:
    """A line for a rule; no line if this user may see the settings of no such topic."""
    of_kind = [n for n in seen.topics if n.startswith(rule.beginnings)] if rule.beginnings else seen.message_topics()
    values = {name: value for name in of_kind if (value := seen.setting(rule.setting, name))}
    bad = [f"{name} has {value}" for name, value in values.items() if not holds(rule.is_good, value)]
    check = f"{rule.setting} ({rule.kind})"
    if bad:
        yield Line(check, rule.level, f"{named(bad)}: {rule.remedy}")
    elif values:
        yield Line(check, "ok", f"good in {len(values)} topics")
