"""The stored bodies that the records of a Kafka cluster name, whatever became of their messages.

Waiting, delayed, retried, refused and dead messages are all records of topics, also those in transactions that have not
ended, so that a search of all topics misses none. It finds more than messages need; that costs room in the store.

A message may move to another topic while these are read, and Kafka may delete the record that it leaves behind: of a
delayed message at once, of others by retention. So the topics are read in passes, each of which reads what was written
since the one before, and only a pass in which nothing was deleted that it had to read is the last: each message that
existed at its beginning was then in a record that one of the passes has read.

Compaction deletes without a trace, so there are two passes at least: what the second one has to read is new, and Kafka
does not compact the newest segment of a partition.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from notify.errors import Forbidden, Unavailable
from notify.kafka.brokers import known_topics, translated
from notify.kafka.calls import answered, gathered, offset_of
from notify.kafka.cluster import Cluster
from notify.kafka.rights import of_sweep, user_of
from notify.kafka.table import PASSING, arrived, reader
from notify.kafka.topic_ids import topic_ids
from notify.protocol.large_bodies import mentioned

CALL_SECONDS = 30.0
SILENT_SECONDS = 60.0
"""How long Kafka may give no record while partitions are not read to their ends."""
POLL_SECONDS = 1.0
AT_ONCE = 1000
PASSES = 20
"""If this many passes have missed records, Kafka deletes faster than it is read."""
KAFKAS_OWN = frozenset(("__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"))
"""Topics of Kafka's own, in which no message can be."""
_READS = (AclOperation.READ, AclOperation.ALL)
_HIDES = (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.ALL)
"""Operations without which a user does not see a topic, or not its records."""


class Place(NamedTuple):
    """A partition of a topic; a topic that is deleted and made again has another id."""

    topic: str
    topic_id: str
    partition: int

    @property
    def spot(self) -> tuple[str, int]:
        return self.topic, self.partition


class Extent(NamedTuple):
    """Offsets [low, high) of a partition."""

    low: int
    high: int


def named_in_kafka(url: str) -> Iterator[set[str]]:
    """The bodies that the records of a cluster name, some at a time.

    Raises Forbidden unless it is certain that this user may read every topic; Unavailable, Unauthorized; InvalidRequest
    for a URL that is none.
    """
    cluster = Cluster.of(url)
    try:
        _check_sees_all(cluster)
        yield from _passes(cluster)
    except KafkaException as raised:
        raise translated(raised.args[0], cluster, of_sweep()) from raised
    except TimeoutError:
        raise Unavailable(f"Kafka at {cluster.brokers} does not answer within {CALL_SECONDS:g} s") from None


def _check_sees_all(cluster: Cluster) -> None:
    """Raises Forbidden if there may be topics that the brokers hide from this user: they leave them out of their lists,
    so that only the rights themselves say whether there are any."""
    known_topics(cluster)  # says why brokers do not answer
    admin = cluster.admin()
    if _has_no_rights(admin):
        return
    every_one: Any = None  # the types of the client demand a text
    every = AclBindingFilter(
        ResourceType.TOPIC,
        every_one,
        ResourcePatternType.ANY,
        every_one,
        every_one,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    # Kafka's client gives no rights, and no error, where the brokers refuse to say.
    found = answered(admin.describe_acls(every, request_timeout=CALL_SECONDS), CALL_SECONDS)
    name = cluster.settings.get("sasl.username")
    mine = [acl for acl in found if acl.principal in ("User:*", f"User:{name}")]
    # Without a name (certificates, Kerberos, tokens) each denial may be one of this client.
    denied_to = mine if name else found
    may_read_all = any(
        acl.permission_type == AclPermissionType.ALLOW
        and acl.operation in _READS
        and (acl.name, acl.resource_pattern_type, acl.host) == ("*", ResourcePatternType.LITERAL, "*")
        for acl in mine
    )
    hidden = sorted(
        acl.name for acl in denied_to if acl.permission_type == AclPermissionType.DENY and acl.operation in _HIDES
    )
    if hidden or not may_read_all:
        raise Forbidden(
            f"a sweep has to see all topics of Kafka at {cluster.brokers}, which hides those that {user_of(cluster)} "
            "may not read: "
            + (
                f"take away what denies it {', '.join(hidden)}"
                if hidden
                else "grant it Read on every topic (`*`), and Describe on the cluster, which says so"
            )
        )


def _has_no_rights(admin: AdminClient) -> bool:
    """Whether no broker knows of rights, so that everybody sees everything. A broker that does not say it has some."""
    numbers = map(str, admin.list_topics(timeout=CALL_SECONDS).brokers)
    asked = [ConfigResource(ResourceType.BROKER, number) for number in numbers]
    settings = gathered(admin.describe_configs(asked, request_timeout=CALL_SECONDS), CALL_SECONDS).values()
    return all(not isinstance(each, KafkaError) and _is_empty(each.get("authorizer.class.name")) for each in settings)


def _is_empty(setting: Any) -> bool:
    return setting is not None and not setting.is_sensitive and not setting.value


def _passes(cluster: Cluster) -> Iterator[set[str]]:
    admin = cluster.admin()
    read_to: dict[Place, int] = {}
    with closing(reader(cluster, "notify-positions", _AS_WRITTEN)) as consumer:
        for number in range(PASSES):
            extents = extents_of(cluster, admin)
            unread = {
                place: Extent(start, extent.high)
                for place, extent in extents.items()
                if (start := max(extent.low, read_to.get(place, 0))) < extent.high
            }
            yield from read(consumer, cluster, unread)
            read_to = {place: extent.high for place, extent in extents.items()}
            if number and not _has_lost(unread, extents_of(cluster, admin)):
                return
    raise Unavailable(
        f"Kafka at {cluster.brokers} deletes records faster than they can be read: {PASSES} times some were gone before"
    )


_AS_WRITTEN = {"isolation.level": "read_uncommitted", "auto.offset.reset": "earliest"}


def _has_lost(unread: Mapping[Place, Extent], now: Mapping[Place, Extent]) -> bool:
    """Whether records may have been deleted before they were read; their messages may be in other records now."""
    return any(place not in now or now[place].low > extent.low for place, extent in unread.items())


def extents_of(cluster: Cluster, admin: AdminClient) -> dict[Place, Extent]:
    """The offsets of all partitions of all topics. Raises KafkaException, TimeoutError, Unavailable."""
    topics = {name: topic for name, topic in known_topics(cluster).items() if name not in KAFKAS_OWN}
    ids = topic_ids(admin, topics, CALL_SECONDS)
    places = [Place(name, ids[name], n) for name in sorted(ids) for n in sorted(topics[name].partitions)]
    lows = _offsets(admin, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
    highs = _offsets(admin, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
    return {place: Extent(lows[place.spot], highs[place.spot]) for place in places}


def _offsets(admin: AdminClient, places: Collection[Place], wanted: OffsetSpec) -> dict[tuple[str, int], int]:
    if not places:
        return {}
    calls = admin.list_offsets(
        {TopicPartition(*place.spot): wanted for place in places},
        isolation_level=IsolationLevel.READ_UNCOMMITTED,
        request_timeout=CALL_SECONDS,
    )
    offsets: dict[tuple[str, int], int] = {}
    for place, answer in gathered(calls, CALL_SECONDS).items():
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        offsets[place.topic, place.partition] = offset_of(answer)
    return offsets


def read(consumer: Consumer, cluster: Cluster, unread: Mapping[Place, Extent]) -> Iterator[set[str]]:
    """The bodies that these records name. Raises KafkaException; Unavailable if Kafka gives nothing for long."""
    left = {place.spot: extent.high for place, extent in unread.items()}
    if not left:
        return
    assigned = [TopicPartition(*place.spot, extent.low) for place, extent in unread.items()]
    consumer.assign(assigned)
    consumer.resume(assigned)  # the pass before has paused them
    until = time.monotonic() + SILENT_SECONDS
    while left:
        found: set[str] = set()
        for message in arrived(consumer, AT_ONCE, POLL_SECONDS):
            error, spot, offset = message.error(), (message.topic() or "", message.partition() or 0), message.offset()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if not (error.retriable() or error.code() in PASSING):
                    raise KafkaException(error)
                continue
            until = time.monotonic() + SILENT_SECONDS
            if error is None:
                found |= mentioned(message.value() or b"")
            # The last offsets may be a transaction's end, which is not a record: then the partition's end comes.
            if spot in left and (offset or 0) + (error is None) >= left[spot]:
                del left[spot]
                consumer.pause([TopicPartition(*spot)])
        if found:
            yield found
        if time.monotonic() > until:
            some = ", ".join(f"{topic}/{number}" for topic, number in sorted(left)[:5])
            raise Unavailable(
                f"Kafka at {cluster.brokers} gives nothing for {SILENT_SECONDS:g} s of {len(left)} partitions ({some})"
            )
