"""Checks a history for violations, after all faults have ended and everything had time to settle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KINDS = ("LOST", "DOUBLED", "PHANTOM", "DISORDER", "EARLY", "STUCK", "OPPOSITE", "ANSWER", "FAILED", "DIED")


@dataclass(frozen=True, slots=True)
class Effect:
    """A row that a handler wrote with its inbox row; effects are in the order of their rows."""

    who: str
    """The consumer that must have each message once: the group, or for broadcasts `group@instance`."""
    number: str
    key: str
    queue: int
    offset: int
    committed_at: str
    """The message's `committed_at` as the consumer received it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A committed record of Kafka, as any reader sees it; records are in the order of their partitions."""

    topic: str
    number: str
    key: str
    partition: int
    offset: int


@dataclass(slots=True)
class History:
    """The facts of a run."""

    committed: dict[str, str] = field(default_factory=dict)
    """The topics of messages whose business rows are in a database, by message number."""
    intents: set[str] = field(default_factory=set)
    """Intents with business rows; each has as many rows as messages."""
    answers: dict[str, str] = field(default_factory=dict)
    """The caller's answer by intent: `committed`, `refused`, `rolled back`; missing: no answer came."""
    expected: dict[str, set[str]] = field(default_factory=dict)
    """The committed messages that each consumer must have, by number."""
    effects: list[Effect] = field(default_factory=list)
    records: list[Record] | None = None
    """The records of the message topics, where they are in Kafka."""
    refused_for_good: dict[str, set[str]] = field(default_factory=dict)
    """Message numbers that were dead letters once, by group; redriven, they arrive out of order."""
    ordered: frozenset[str] = frozenset()
    """Groups that receive the messages of a key in order."""
    moved_in_order: dict[str, list[str]] = field(default_factory=dict)
    """Message numbers in the order of their commits, by key, where a bridge or relay promises to keep that order."""
    opposite: list[str] = field(default_factory=list)
    """A sentence for each transaction with opposite outcomes in the database and on the server."""
    early: list[str] = field(default_factory=list)
    """A sentence for each message that was handled before it was due."""
    failed: list[str] = field(default_factory=list)
    """A sentence for each request that a server failed on by a fault of its own."""
    died: list[str] = field(default_factory=list)
    """A sentence for each process that a signal ended which nobody sent, and each server that ended by itself."""
    unsettled: list[str] = field(default_factory=list)
    """A sentence for each thing that still waits although all faults have ended."""


def violations(history: History) -> list[str]:
    """Every broken promise as a text that begins with one of KINDS."""
    return [
        *_answers(history), *_effects(history), *_read(history), *_disorder(history), *_moved(history),
        *(f"EARLY: {sentence}" for sentence in history.early),
        *(f"STUCK: {sentence}" for sentence in history.unsettled),
        *(f"FAILED: {sentence}" for sentence in history.failed),
        *(f"DIED: {sentence}" for sentence in history.died),
    ]  # fmt: skip


def counts(violations: Iterable[str]) -> Mapping[str, int]:
    """The number of violations of each kind."""
    counted = Counter(line.partition(":")[0] for line in violations)
    return {kind: counted.get(kind, 0) for kind in KINDS}


def _answers(history: History) -> Iterable[str]:
    for number, answer in history.answers.items():
        if answer == "committed" and number not in history.intents:
            yield f"ANSWER: {number} was reported as committed, and its row is in no database"
        elif answer in ("refused", "rolled back") and number in history.intents:
            yield f"ANSWER: {number} was reported as {answer}, and its row is in the database"
    yield from (f"OPPOSITE: {sentence}" for sentence in history.opposite)


def _effects(history: History) -> Iterable[str]:
    times: dict[str, Counter[str]] = defaultdict(Counter)
    for effect in history.effects:
        times[effect.who][effect.number] += 1
    for who, wanted in history.expected.items():
        had = times[who]
        for number in wanted - had.keys():
            yield f"LOST: {number} committed and had no effect in {who}"
        for number, count in had.items():
            if count > 1:
                yield f"DOUBLED: {number} took effect {count} times in {who}"
            if number not in wanted:
                what = "is not for it" if number in history.committed else "did not commit"
                yield f"PHANTOM: {number} took effect in {who} and {what}"


def _read(history: History) -> Iterable[str]:
    """A plain reader of committed records must see each message once, and nothing else."""
    if history.records is None:
        return
    times = Counter(record.number for record in history.records)
    for number in history.committed.keys() - times.keys():
        yield f"LOST: {number} committed and is not in {history.committed[number]}"
    for number, count in times.items():
        if count > 1:
            yield f"DOUBLED: {number} is in Kafka {count} times"
        if number not in history.committed:
            yield f"PHANTOM: {number} is in Kafka and did not commit"
    for record in history.records:
        if history.committed.get(record.number, record.topic) != record.topic:
            yield f"PHANTOM: {record.number} is in {record.topic}, not in {history.committed[record.number]}"


def _disorder(history: History) -> Iterable[str]:
    last: dict[tuple[str, str, str], Effect] = {}
    for effect in history.effects:
        if effect.who not in history.ordered:
            continue
        if effect.number in history.refused_for_good.get(effect.who, set()):
            continue
        place = (effect.who, history.committed.get(effect.number, ""), effect.key)
        before = last.get(place)
        last[place] = effect
        if before is None:
            continue
        if not _is_later(before, effect):
            yield (
                f"DISORDER: {effect.who} had {effect.queue}@{effect.offset} of key {effect.key} after "
                f"{before.queue}@{before.offset}"
            )


def _moved(history: History) -> Iterable[str]:
    """Whether what a bridge or relay moved is in the order of its commits, by key and topic."""
    if history.records is not None:
        yield from _moved_to_kafka(history, history.records)
        return
    # Effects of one consumer have the places of its messages in the queues, whatever was redelivered or replayed.
    places: dict[str, Effect] = {effect.number: effect for effect in history.effects if effect.who in history.ordered}
    for key, numbers in history.moved_in_order.items():
        before: Effect | None = None
        for number in numbers:
            effect = places.get(number)
            if effect is None or any(number in refused for refused in history.refused_for_good.values()):
                continue
            if before is not None and not _is_later(before, effect):
                yield _moved_late(key, before.number, number)
            before = effect


def _moved_to_kafka(history: History, records: Iterable[Record]) -> Iterable[str]:
    places = {record.number: record for record in records}
    for key, numbers in history.moved_in_order.items():
        last: dict[str, Record] = {}
        for number in numbers:
            record = places.get(number)
            if record is None:
                continue
            before = last.get(record.topic)
            if before is not None and before.partition != record.partition:
                yield f"DISORDER: key {key} of {record.topic} is in partitions {before.partition}, {record.partition}"
            elif before is not None and before.offset > record.offset:
                yield _moved_late(key, before.number, number)
            last[record.topic] = record


def _moved_late(key: str, before: str, number: str) -> str:
    return f"DISORDER: key {key} was committed as {before}, {number}, and moved the other way round"


def _is_later(before: Effect, effect: Effect) -> bool:
    if before.queue == effect.queue:
        return before.offset < effect.offset
    # The topic got more queues, and the key belongs to another one now.
    return before.committed_at <= effect.committed_at
