"""What a history may not contain. It is read after all faults are over and everything was given time to settle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KINDS = ("LOST", "DOUBLED", "PHANTOM", "DISORDER", "STUCK", "OPPOSITE", "ANSWER")


@dataclass(frozen=True, slots=True)
class Effect:
    """A row that a handler wrote with its inbox row, in the order of the rows."""

    who: str
    """The group, where a topic is broadcast with its instance: who must have each message once."""
    number: str
    key: str
    queue: int
    offset: int
    committed_at: str
    """When the message was committed, as the consumer was told."""


@dataclass(slots=True)
class History:
    """What was seen of a run."""

    committed: dict[str, str] = field(default_factory=dict)
    """Numbers of the messages whose business rows are in a database, with their topics."""
    intents: set[str] = field(default_factory=set)
    """Intents that have such a row: one has as many as it sends messages."""
    answers: dict[str, str] = field(default_factory=dict)
    """By intent what its caller was told: `committed`, `refused`, `rolled back`. Not there: nobody was told."""
    expected: dict[str, str] = field(default_factory=dict)
    """Who must have had every committed message of which topic."""
    effects: list[Effect] = field(default_factory=list)
    refused_for_good: dict[str, set[str]] = field(default_factory=dict)
    """By group the numbers that a handler refused once: sent again, they come out of their order."""
    ordered: frozenset[str] = frozenset()
    """Groups that have the messages of a key in order."""
    opposite: list[str] = field(default_factory=list)
    """Transactions of which the database and the server say opposite things, in a sentence each."""
    unsettled: list[str] = field(default_factory=list)
    """What still waits although nothing disturbs it any more, in a sentence each."""


def violations(history: History) -> list[str]:
    """Every promise that the history breaks, each beginning with one of KINDS."""
    return [*_answers(history), *_effects(history), *_disorder(history), *_stuck(history)]


def counts(violations: Iterable[str]) -> Mapping[str, int]:
    """How many there are of each kind."""
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
    for who, topic in history.expected.items():
        had = times[who]
        wanted = {number for number, of_topic in history.committed.items() if of_topic == topic}
        for number in wanted - had.keys():
            yield f"LOST: {number} committed and had no effect in {who}"
        for number, count in had.items():
            if count > 1:
                yield f"DOUBLED: {number} took effect {count} times in {who}"
            if number not in wanted:
                yield f"PHANTOM: {number} took effect in {who} and did not commit"


def _disorder(history: History) -> Iterable[str]:
    last: dict[tuple[str, str], Effect] = {}
    for effect in history.effects:
        if effect.who not in history.ordered:
            continue
        if effect.number in history.refused_for_good.get(effect.who, set()):
            continue
        before = last.get((effect.who, effect.key))
        last[(effect.who, effect.key)] = effect
        if before is None:
            continue
        if before.queue == effect.queue:
            is_later = before.offset < effect.offset
        else:  # the topic grew, and the key belongs to another queue since
            is_later = before.committed_at <= effect.committed_at
        if not is_later:
            yield (
                f"DISORDER: {effect.who} had {effect.queue}@{effect.offset} of key {effect.key} after "
                f"{before.queue}@{before.offset}"
            )


def _stuck(history: History) -> Iterable[str]:
    return (f"STUCK: {sentence}" for sentence in history.unsettled)
