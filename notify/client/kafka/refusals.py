"""Errors of Kafka's client as ours, each one sentence that says what to do."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from notify.errors import Conflict, InvalidRequest, NotifyError, Unavailable
from notify.kafka import hindrance, rights
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, FENCED

OTHERS_NOW = frozenset(
    (
        KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID, KafkaError._ASSIGNMENT_LOST, KafkaError.STALE_MEMBER_EPOCH,
    )
)  # fmt: skip
"""The partitions are another's, or may be: what was done is committed again, or comes again there."""


def refusal(error: KafkaError, cluster: Cluster, group: str) -> NotifyError:
    """An error of the client that ends a call, as ours. `group`: Kafka's."""
    code, brokers = error.code(), cluster.brokers
    if hindrance.refuses(error):
        return hindrance.refusal(error, cluster)
    lacks = rights.missing(error, cluster, rights.of_consumer(group.partition("@")[0]))
    if lacks is not None:
        return lacks
    if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return InvalidRequest(
            f"Kafka at {brokers} takes too little beside a group's offsets; set offset.metadata.max.bytes of the "
            "brokers to 4096, their default, or more"
        )
    if code in FENCED:
        return Conflict(f"another instance owns group {group!r} now", "topic_is_taken")
    if code in AWAY:
        return Unavailable(f"Kafka at {brokers} does not answer: {error.str()}; is it running there?")
    return Unavailable(f"Kafka at {brokers}: {error.str()}")


def error_of(raised: KafkaException) -> KafkaError:
    """The error that an exception of the client carries."""
    error: KafkaError = raised.args[0]
    return error


def is_final(error: KafkaError) -> bool:
    """Whether trying again cannot help."""
    return (
        error.fatal()
        or hindrance.refuses(error)
        or error.code() in rights.REFUSED
        or error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE
    )
