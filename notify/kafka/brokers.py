"""Kafka's brokers: making topics, waiting for answers, and what their errors mean."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic, TopicMetadata  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unauthorized, Unavailable, stale_epoch
from notify.kafka.answers import answered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, FENCED
from notify.kafka.hindrance import hindrance, refusal, refuses
from notify.kafka.rights import REFUSED, Needs, missing, user_of

CALL_SECONDS = 20.0
FIRST_ANSWER_SECONDS = 2.0
"""After so long it is asked why there is no answer."""
LEAST_OF_BROKERS = 1_048_588
"""`message.max.bytes` of brokers that nobody has configured."""
FOR_NOW = AWAY | {
    KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_CONTROLLER, KafkaError.NETWORK_EXCEPTION,
    KafkaError.THROTTLING_QUOTA_EXCEEDED, KafkaError.BROKER_NOT_AVAILABLE, KafkaError.INVALID_REPLICATION_FACTOR,
}  # fmt: skip
"""Errors with which a topic is not made for now: too few brokers are there for its copies, too."""

KEPT = {"cleanup.policy": "delete"}
"""Brokers may compact whatever says nothing else: of messages with one key all but the last would go."""
COMPACTED = {
    "cleanup.policy": "compact", "segment.bytes": str(16 << 20), "segment.ms": "86400000",
    "min.compaction.lag.ms": "86400000", "min.cleanable.dirty.ratio": "0.1",
}  # fmt: skip
"""A record stays for a day, so that an audit sees that day's; older ones go soon. By default the segment that is
written to, of 1 GB or a week, is never compacted."""


def translated(error: KafkaError, cluster: Cluster, needs: Needs) -> NotifyError:
    """An error of Kafka's client as ours, in a sentence that says what to do.

    Conflict for a publisher that is fenced, Unauthorized for a login or certificate that is refused, Forbidden where a
    right is missing, else Unavailable. Where there is no answer the brokers are asked why, which takes some seconds.
    """
    code = error.code()
    if code in FENCED:
        return stale_epoch("another bridge of this source publishes now; stop one of the two")
    if refuses(error):
        return refusal(error, cluster)
    if code in AWAY and (reason := hindrance(cluster)) is not None:
        return reason
    return missing(error, cluster, needs) or Unavailable(f"Kafka: {error.str()}")


def known_topics(cluster: Cluster, seconds: float = CALL_SECONDS) -> dict[str, TopicMetadata]:
    """The topics that this user may see, by name.

    Raises Unavailable where the brokers do not answer for so long, and Unauthorized at once where they refuse to.
    """
    admin = cluster.admin()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return admin.list_topics(timeout=min(seconds, FIRST_ANSWER_SECONDS)).topics
        except KafkaException as raised:
            reason = hindrance(cluster)
            if isinstance(reason, Unauthorized):
                raise reason from raised
            if time.monotonic() > deadline:
                silent = Unavailable(f"Kafka at {cluster.brokers} does not answer: {raised.args[0].str()}")
                raise reason or silent from raised


def make_topics(cluster: Cluster, names: list[str], *, compacted: bool = False, largest: int = 0) -> None:
    """Make topics that are missing, with the partitions that the cluster's settings say (compacted ones: one).

    `largest`: bytes of a record that they have to take, 0: whatever the brokers say. Raises Unavailable where the
    brokers do not answer or cannot do it now, InvalidRequest where they refuse.
    """
    config = dict(COMPACTED if compacted else KEPT)
    if largest > LEAST_OF_BROKERS:
        config["max.message.bytes"] = str(largest)
    partitions = 1 if compacted else cluster.partitions
    make_missing(cluster, [new_topic(name, partitions, config) for name in names])


def new_topic(name: str, partitions: int, config: dict[str, str]) -> NewTopic:
    """A topic to make, with as many replicas as the brokers say."""
    return NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config)


def make_missing(cluster: Cluster, wanted: Sequence[NewTopic]) -> list[str]:
    """Make those topics that are missing. Raises what make_topics raises.

    Returns those that seemed to be missing and exist: made by another meanwhile, or hidden from this user.
    """
    known = known_topics(cluster)
    missing = [topic for topic in wanted if topic.topic not in known]
    admin = cluster.admin()
    bounds = {"request_timeout": CALL_SECONDS, "operation_timeout": CALL_SECONDS}
    made = admin.create_topics(missing, **bounds) if missing else {}
    existing = []
    for name, done in made.items():
        try:
            answered(done, CALL_SECONDS)
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                existing.append(name)
            elif error.code() in FOR_NOW or error.retriable():
                raise Unavailable(f"Kafka does not make topic {name!r} now: {error.str()}") from raised
            else:
                raise _not_made(name, error, cluster) from raised
    return existing


def _not_made(name: str, error: KafkaError, cluster: Cluster) -> InvalidRequest:
    """The sentence for a topic that the brokers refuse to make."""
    if error.code() in REFUSED:
        return InvalidRequest(
            f"Kafka shows no topic {name!r} to {user_of(cluster)}, and refuses to make it: grant Create on the topic, "
            "or Describe where it exists",
            "no_topic",
        )
    return InvalidRequest(f"Kafka refuses to make topic {name!r}: {error.str()}. Make it, or rename it", "no_topic")
