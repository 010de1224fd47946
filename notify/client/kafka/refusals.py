"""Translates errors of Kafka's client into Notify's errors, whose texts say what to do."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from notify.errors import Conflict, NotifyError, Unavailable
from notify.kafka import diagnosis, rights
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, FENCED

OTHERS_NOW = frozenset(
    (
        KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID, KafkaError._ASSIGNMENT_LOST, KafkaError.STALE_MEMBER_EPOCH,
    )
)  # fmt: skip
"""Errors that mean that partitions belong, or may belong, to another instance. Progress is committed again, or the
messages are delivered again there."""


def refusal(error: KafkaError, cluster: Cluster, group: str) -> NotifyError:
    """Notify's error for an error that ends a call of the client. `group`: the name of Kafka's group."""
    code, brokers = error.code(), cluster.brokers
    if diagnosis.refuses(error):
        return diagnosis.refusal(error, cluster)
    missing_right = rights.missing(error, cluster, rights.of_consumer(group.partition("@")[0]))
    if missing_right is not None:
        return missing_right
    if (of_setting := diagnosis.bad_setting(error, cluster)) is not None:
        return of_setting
    if code in FENCED:
        return Conflict(f"another instance owns group {group!r} now", "topic_is_taken")
    if code in AWAY:
        return Unavailable(f"Kafka at {brokers} does not answer: {error.str()}; is it running there?")
    return Unavailable(f"Kafka at {brokers}: {error.str()}")


def error_of(raised: KafkaException) -> KafkaError:
    """The error in an exception of the client."""
    error: KafkaError = raised.args[0]
    return error


def is_final(error: KafkaError) -> bool:
    """Whether a retry cannot mend the error."""
    return (
        error.fatal()
        or diagnosis.refuses(error)
        or error.code() in rights.REFUSED
        or error.code() in diagnosis.SETTINGS_OF_BROKERS
    )
