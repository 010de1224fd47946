"""Subscriptions of consumer groups over Kafka: the records of the topic `notify-subscriptions`.

Kafka stores a group's offsets, but not its mode, tags and filter, and not where it began. The owner of a partition
writes these here, for audits and for servers that show groups. The topic is compacted and has one partition. A record's
key is `{group}/{topic}/{partition}`, its value JSON, see Subscribed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.progress import Progress
from notify.kafka.rights import of_consumer
from notify.kafka.table import KafkaTable
from notify.protocol.limits import digits

TOPIC = "notify-subscriptions"
MOST_SKIPPED = 16
"""The most resets of a partition that are noted, the last ones."""
MOST_RUNS = 10_000
"""The most stretches that these may have skipped together: a record stays far below what brokers take."""
MOST_PASSED = 16
"""The most stretches of a partition that other programs passed over; of more, the two oldest are joined."""


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Skipped(msgspec.Struct, frozen=True):
    """The records of a partition that a reset skipped."""

    runs: tuple[tuple[int, int], ...]
    """The records that the group had not settled: (first offset, offset after the last), ascending."""
    at_us: int
    """When, in microseconds since 1970, by the consumer's clock."""
    reset: str = ""
    """The reset's id (control.py)."""

    @classmethod
    def between(cls, progress: Progress, start: int, at_us: int, reset: str) -> Skipped | None:
        """All that lies unsettled between a group's progress and its new start; None if nothing does."""
        runs, first = [], progress.offset
        for offset in [*sorted(progress.done), start]:
            if first < min(offset, start):
                runs.append((first, min(offset, start)))
            first = max(first, offset + 1)
        return cls(tuple(runs), at_us, reset) if runs else None


class Subscribed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group's subscription to a partition. `start`: the first offset that it reads with this subscription.

    `at`: a later offset of the group, at most some hours old; 0: none was recorded since the start.
    `passed`: stretches (first offset, offset after the last), ascending, that commits of other programs passed over:
    how many of these messages the group had handled is not known.
    `inbox_from_us`: when its consumers first reported an inbox, in microseconds since 1970; -1: they have none.
    `topic_id`: Kafka's id of the topic; empty if unknown. `skipped`: by the last resets, the newest last. `reset`: the
    id of the last reset that was carried out here (control.py), which a commit of another tool does not tell.
    """

    mode: str
    start: int
    tags: tuple[str, ...] = ()
    filter: str = ""
    at: int = 0
    inbox_from_us: int = -1
    topic_id: str = ""
    skipped: tuple[Skipped, ...] = ()
    reset: str = ""
    passed: tuple[tuple[int, int], ...] = ()

    def takes_as(self, other: Subscribed) -> bool:
        """Whether both subscriptions are equal except for where they began."""
        is_same_topic = self.topic_id == other.topic_id or not (self.topic_id and other.topic_id)
        return is_same_topic and (self.mode, self.tags, self.filter) == (other.mode, other.tags, other.filter)

    def with_skipped(self, earlier: Subscribed, skipped: Skipped | None) -> Subscribed:
        """This subscription with what resets skipped, according to an earlier record, and with what one skips now; and
        with what other programs passed over before its start: the group handles later messages itself."""
        is_other = self.topic_id and earlier.topic_id and self.topic_id != earlier.topic_id
        several = [*(() if is_other else earlier.skipped), *(() if skipped is None else (skipped,))]
        kept: list[Skipped] = []
        room = MOST_RUNS
        for each in reversed(several[-MOST_SKIPPED:]):
            room -= len(each.runs)
            if room < 0:
                break
            kept.append(each)
        passed = () if is_other else _before(self.start, earlier.passed)
        return msgspec.structs.replace(self, skipped=tuple(reversed(kept)), passed=passed)

    def moved(self, offset: int) -> Subscribed:
        """This subscription after another program has committed an offset for the group."""
        last, passed = max(self.start, self.at), list(_before(offset, self.passed))
        if offset <= last:
            return msgspec.structs.replace(self, passed=tuple(passed))
        passed.append((last, offset))
        while len(passed) > 1 and (len(passed) > MOST_PASSED or passed[-2][1] == last):
            n = 0 if len(passed) > MOST_PASSED else len(passed) - 2
            passed[n : n + 2] = [(passed[n][0], passed[n + 1][1])]
        return msgspec.structs.replace(self, at=offset, passed=tuple(passed))

    def with_inbox_of(self, other: Subscribed) -> Subscribed:
        """This subscription with the inbox of another record; if both have an inbox, with the earlier time."""
        from_us = other.inbox_from_us
        if min(from_us, self.inbox_from_us) >= 0:
            from_us = min(from_us, self.inbox_from_us)
        return msgspec.structs.replace(self, inbox_from_us=from_us)


def _before(offset: int, stretches: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The parts of stretches before an offset."""
    return tuple((first, min(end, offset)) for first, end in stretches if first < offset)


def _key_of(text: str) -> tuple[str, Place] | None:
    parts = text.split("/")
    partition = digits(parts[2]) if len(parts) == 3 else None
    return None if partition is None else (parts[0], Place(parts[1], partition))


def _text_of(key: tuple[str, Place]) -> str:
    group, place = key
    return f"{group}/{place.topic}/{place.partition}"


SUBSCRIPTIONS: KafkaTable[tuple[str, Place], Subscribed] = KafkaTable.of_json(
    TOPIC, Subscribed, text_of=_text_of, key_of=_key_of
)
"""The subscriptions by group and partition."""


class Subscriptions:
    """The recorded subscriptions of one group. Its methods block."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._noted: dict[Place, Subscribed] | None = None
        self._moving: dict[Place, tuple[Progress, str]] = {}
        self._moved: dict[Place, int] = {}

    def moving(self, place: Place, progress: Progress, reset: str) -> None:
        """A reset is about to move the group: the next note that it begins there says what it skips."""
        self._moving[place] = (progress, reset)

    def moved(self, offsets: Mapping[Place, int]) -> None:
        """Other programs have committed these offsets of the group: the next note there says what they passed over."""
        self._moved |= offsets

    def note(self, wanted: Mapping[Place, Subscribed], *, begins: bool, renews: bool = False) -> None:
        """Record subscriptions; they are durable when it returns.

        `begins`: the group begins at these offsets, for the first time or after a reset. Otherwise it continues there,
        and only changes since the last record are written; with `renews` also the group's present offset. Raises
        Unavailable; InvalidRequest if the topic cannot be made.
        """
        if self._noted is None or renews:  # the topic may have been deleted
            SUBSCRIPTIONS.make(self._cluster)
            recorded = SUBSCRIPTIONS.rows(self._cluster)
            self._noted = {place: s for (group, place), s in recorded.items() if group == self._group}
        changed: dict[Place, Subscribed] = {}
        for place, subscribed in wanted.items():
            noted = self._noted.get(place)
            before = self._before(place, subscribed, noted)
            if begins and place in self._moving:
                progress, reset = self._moving[place]
                skipped = Skipped.between(progress, subscribed.start, time.time_ns() // 1000, reset)
            else:
                skipped = None
            if noted is None:
                changed[place] = subscribed.with_skipped(before or subscribed, skipped)
            elif begins or not noted.takes_as(subscribed):
                since = noted.with_inbox_of(subscribed).inbox_from_us
                wanted_now = msgspec.structs.replace(subscribed, inbox_from_us=since)
                changed[place] = wanted_now.with_skipped(before or noted, skipped)
            else:
                updated = (before or noted).with_inbox_of(subscribed)
                updated = msgspec.structs.replace(
                    updated, topic_id=subscribed.topic_id or noted.topic_id, reset=subscribed.reset or noted.reset
                )
                if renews and max(noted.start, noted.at) < subscribed.start:
                    updated = msgspec.structs.replace(updated, at=subscribed.start)
                if updated != noted:
                    changed[place] = updated
        if changed:
            rows = {(self._group, place): subscribed for place, subscribed in changed.items()}
            SUBSCRIPTIONS.put(self._cluster, rows, of_consumer(self._group))
            self._noted |= changed
        for place in wanted:
            self._moved.pop(place, None)
            if begins:
                self._moving.pop(place, None)

    def _before(self, place: Place, wanted: Subscribed, noted: Subscribed | None) -> Subscribed | None:
        """The note of a partition, with what another program has passed over since.

        A group without a note began with that program. But retries are never noted otherwise.
        """
        if noted is None and place.topic.startswith(OWN_TOPICS):
            noted = msgspec.structs.replace(wanted, start=0)
        if noted is None or place not in self._moved:
            return noted
        return noted.moved(self._moved[place])

    def resets(self) -> dict[Place, str]:
        """The ids of the last resets that were carried out, by partition. Raises Unavailable."""
        noted = SUBSCRIPTIONS.rows(self._cluster).items()
        return {place: s.reset for (group, place), s in noted if group == self._group}

    def last(self) -> dict[Place, tuple[int, str]]:
        """The group's last recorded offset and the topic's id, by partition. Raises Unavailable."""
        noted = SUBSCRIPTIONS.rows(self._cluster).items()
        return {place: (max(s.start, s.at), s.topic_id) for (group, place), s in noted if group == self._group}
