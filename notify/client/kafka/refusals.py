"""Errors of Kafka's client as ours, each one sentence that says what to do."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from notify.errors import Conflict, Forbidden, InvalidRequest, NotifyError, Unauthorized, Unavailable

LOGIN = frozenset(
    (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM)
)
RIGHTS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "a topic: give it Read and Describe on the group's topics, and Write and "
    "Create on retry.{group} and dead-letter.{group}",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the group: give it Read on the group {group}",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "a transaction: give it Write on transactional ids that begin "
    "with notify-{group}",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the cluster: give it IdempotentWrite, or make its topics beforehand",
}
OTHERS_NOW = frozenset(
    (
        KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID, KafkaError._ASSIGNMENT_LOST, KafkaError.STALE_MEMBER_EPOCH,
    )
)  # fmt: skip
"""The partitions are another's, or may be: what was done is committed again, or comes again there."""
FENCED = frozenset(
    (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
)  # fmt: skip


def refusal(error: KafkaError, brokers: str, group: str) -> NotifyError:
    """An error of the client that ends a call, as ours."""
    code = error.code()
    if code in LOGIN:
        return Unauthorized(
            f"Kafka at {brokers} refuses the login: {error.str()}; set sasl.username, sasl.password and sasl.mechanism "
            "in the URL, or in the file that NOTIFY_KAFKA_SETTINGS names"
        )
    if code in RIGHTS:
        return Forbidden(f"Kafka at {brokers} refuses {RIGHTS[code].format(group=group)} ({error.str()})")
    if code == KafkaError._SSL:
        return Unauthorized(
            f"TLS with Kafka at {brokers} fails: {error.str()}; set ssl.ca.location to the authority's certificate, "
            "and ssl.certificate.location and ssl.key.location where the brokers ask for one"
        )
    if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return InvalidRequest(
            f"Kafka at {brokers} takes too little beside a group's offsets; set offset.metadata.max.bytes of the "
            "brokers to 4096, their default, or more"
        )
    if code in FENCED:
        return Conflict(f"another instance owns group {group!r} now", "topic_is_taken")
    if code in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE):
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
        or error.code() in LOGIN
        or error.code() in RIGHTS
        or error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE
    )
