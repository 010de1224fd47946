"""The parts of Kafka's topics that an audit reads: ranges of offsets, cut to a time range by the records' times."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from notify.errors import NotifyError, Unavailable
from notify.kafka.brokers import known_topics, translated
from notify.kafka.calls import gathered, offset_of
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_audit
from notify.kafka.topic_ids import topic_ids

CALL_SECONDS = 30.0
MOST_CONFIGS = 200
"""The most topics whose settings are asked for at once: each has about forty."""

K = TypeVar("K")
T = TypeVar("T")


class Part(NamedTuple):
    """Offsets [start, end) of a topic's partition. `number`: the topic's index among the topics that are read."""

    topic: str
    number: int
    partition: int
    start: int
    end: int

    @property
    def place(self) -> str:
        return f"{self.topic}/{self.partition}"


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Extent(NamedTuple):
    """Offsets [low, high) of a partition: all retained and committed records, or a part of them."""

    low: int
    high: int


def reader_of(cluster: Cluster, **settings: Any) -> Consumer:
    """A consumer without a group that verifies checksums and stops at the end of a partition.

    If the records at its offset were deleted, it continues at the oldest remaining record.
    """
    defaults: dict[str, Any] = {"group.id": "notify-audit", "enable.partition.eof": True, "check.crcs": True}
    defaults["auto.offset.reset"] = "earliest"
    defaults["fetch.wait.max.ms"] = 50  # brokers wait this long before they report the end of a partition
    return cluster.consumer(defaults | settings)


def parts_of(cluster: Cluster, topics: Sequence[str]) -> list[Part]:
    """A part for each partition of the topics, with all its present records. Raises Unavailable."""
    numbers = {name: number for number, name in enumerate(topics)}
    return [
        Part(place.topic, numbers[place.topic], place.partition, *extent)
        for place, extent in extents(cluster, topics).items()
    ]


def extents(cluster: Cluster, topics: Sequence[str]) -> dict[Partition, Extent]:
    """The present extent of each partition of the topics. Raises Unavailable."""
    try:
        present = known_topics(cluster, CALL_SECONDS)
        places = [Partition(name, number) for name in topics for number in sorted(present[name].partitions)]
    except KafkaException as error:
        raise _unavailable(cluster, error) from error
    lows = _offsets(cluster, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
    highs = _offsets(cluster, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
    return {place: Extent(lows[place][0], max(lows[place][0], highs[place][0])) for place in places}


def ends_of(cluster: Cluster, places: Collection[Partition]) -> dict[Partition, int]:
    """Where these partitions end, with the records of open transactions. Raises Unavailable."""
    wanted = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    answers = _offsets(cluster, places, wanted, IsolationLevel.READ_UNCOMMITTED)
    return {place: offset for place, (offset, _) in answers.items()}


def ids_of(cluster: Cluster, topics: Collection[str]) -> dict[str, str]:
    """The ids of the existing topics among `topics`, by name. Raises Unavailable."""
    try:
        return topic_ids(cluster.admin(), topics, CALL_SECONDS)
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(cluster, error) from error


def cut(cluster: Cluster, whole: Mapping[Partition, Extent], from_us: int, until_us: int) -> dict[Partition, Extent]:
    """The part of each partition from its first record not before `from_us` to its first record not before `until_us`.

    0: no bound. Records of several producers may not be in the order of their times. The part may therefore have
    records that are older than `from_us`, but before it there is no record that is newer. Raises Unavailable.
    """
    starts = {place: offset for place, (offset, _) in _first_at(cluster, whole, from_us).items()} if from_us else {}
    ends = {place: offset for place, (offset, _) in _first_at(cluster, whole, until_us).items()} if until_us else {}
    return {
        place: Extent(start := starts.get(place, extent.low), max(start, ends.get(place, extent.high)))
        for place, extent in whole.items()
    }


def deleted(cluster: Cluster, parts: Mapping[Partition, Extent]) -> dict[Partition, Extent]:
    """The remaining offsets of those parts whose first records were deleted, as by retention. Raises Unavailable."""
    with_records = {place: part for place, part in parts.items() if part.high > part.low}
    present = known_topics(cluster, CALL_SECONDS)
    now = extents(cluster, sorted({place.topic for place in with_records} & present.keys()))
    remaining: dict[Partition, Extent] = {}
    for place, part in with_records.items():
        low = now[place].low if place in now else part.high  # the whole topic was deleted
        if low > part.low:
            remaining[place] = Extent(min(low, part.high), part.high)
    return remaining


def whole_from(cluster: Cluster, places: Mapping[Partition, Extent], now_us: int) -> int:
    """The instant (microseconds since 1970) from which on these partitions lack no record; 0: no record was deleted.

    Raises Unavailable.
    """
    trimmed = {place: extent for place, extent in places.items() if extent.low > 0}
    with_records = {place: extent for place, extent in trimmed.items() if extent.high > extent.low}
    first_us = [us for _, us in _first_at(cluster, with_records, 0).values() if us >= 0]
    emptied = {place.topic for place in trimmed.keys() - with_records.keys()}
    return max([0, *first_us, *(now_us - retention_us for retention_us in _retention_us(cluster, emptied))])


def _first_at(cluster: Cluster, places: Mapping[Partition, Extent], at_us: int) -> dict[Partition, tuple[int, int]]:
    """For each partition: the offset of the first record at or after an instant, and the record's time in microseconds.

    The partition's end and -1 if there is no such record.
    """
    answers = _offsets(cluster, places, OffsetSpec.for_timestamp(max(0, at_us // 1000)))
    first = {}
    for place, extent in places.items():
        offset, at_ms = answers[place]
        has_any = 0 <= offset < extent.high
        first[place] = (max(offset, extent.low), at_ms * 1000) if has_any else (extent.high, -1)
    return first


def _retention_us(cluster: Cluster, topics: Collection[str]) -> list[int]:
    """How long each of these topics keeps records; 0 for a topic that also deletes by size."""
    if not topics:
        return []
    admin = cluster.admin()
    try:
        wanted = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        configs = _answers(admin.describe_configs(wanted, request_timeout=CALL_SECONDS)).values()
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(cluster, error) from error
    by_time = [int(c["retention.ms"].value) if int(c["retention.bytes"].value) < 0 else 0 for c in configs]
    return [milliseconds * 1000 for milliseconds in by_time if milliseconds >= 0]


def compacted(cluster: Cluster, topics: Collection[str]) -> list[str]:
    """Those of these topics from which Kafka deletes a key's earlier records. A topic whose settings this user may not
    see is left out."""
    admin = cluster.admin()
    names = sorted(topics)
    found: list[str] = []
    for first in range(0, len(names), MOST_CONFIGS):
        some = names[first : first + MOST_CONFIGS]
        wanted = [ConfigResource(ResourceType.TOPIC, name) for name in some]
        try:
            answers = gathered(admin.describe_configs(wanted, request_timeout=CALL_SECONDS), CALL_SECONDS)
        except (KafkaException, TimeoutError) as error:
            raise _unavailable(cluster, error) from error
        for resource, answer in answers.items():
            if not isinstance(answer, KafkaError) and "compact" in answer["cleanup.policy"].value:
                found.append(resource.name)
    return sorted(found)


def _offsets(
    cluster: Cluster,
    places: Collection[Partition],
    wanted: OffsetSpec,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Partition, tuple[int, int]]:
    """For each partition: (offset, time of its record in milliseconds)."""
    if not places:
        return {}
    admin = cluster.admin()  # referenced until all have answered: without the client there are no answers
    try:
        calls = admin.list_offsets(
            {TopicPartition(*place): wanted for place in places},
            isolation_level=isolation,
            request_timeout=CALL_SECONDS,
        )
        return {
            Partition(place.topic, place.partition): (offset_of(answer), answer.timestamp)
            for place, answer in _answers(calls).items()
        }
    except (KafkaException, TimeoutError) as error:
        raise _unavailable(cluster, error) from error


def _answers(calls: Mapping[K, Future[T]]) -> dict[K, T]:
    """The answers to all of these calls, within little more than CALL_SECONDS.

    Raises KafkaException, TimeoutError.
    """
    answers: dict[K, T] = {}
    for name, answer in gathered(calls, CALL_SECONDS).items():
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        answers[name] = answer
    return answers


def _unavailable(cluster: Cluster, error: Exception) -> NotifyError:
    if isinstance(error, KafkaException):
        return translated(error.args[0], cluster, of_audit())
    return Unavailable(f"Kafka at {cluster.brokers}: no answer within {CALL_SECONDS:g} s")
