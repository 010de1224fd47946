"""Makes and lists topics at Kafka's brokers, and translates the brokers' errors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, TopicMetadata  # type: ignore[attr-defined]

from notify.errors import InvalidRequest, NotifyError, Unauthorized, Unavailable, stale_epoch
from notify.kafka.calls import answered
from notify.kafka.cluster import Cluster
from notify.kafka.codes import AWAY, FENCED
from notify.kafka.diagnosis import bad_setting, refusal, refuses, why_unreachable
from notify.kafka.rights import REFUSED, Needs, missing, user_of
from notify.protocol.limits import digits
from notify.runtime.program_log import program_log

log = program_log("notify.kafka")

CALL_SECONDS = 20.0
FIRST_ANSWER_SECONDS = 2.0
"""After this time without an answer, the reason is looked for."""
LEAST_OF_BROKERS = 1_048_588
"""The default of a broker's `message.max.bytes`."""
FOR_NOW = AWAY | {
    KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_CONTROLLER, KafkaError.NETWORK_EXCEPTION,
    KafkaError.THROTTLING_QUOTA_EXCEEDED, KafkaError.BROKER_NOT_AVAILABLE, KafkaError.INVALID_REPLICATION_FACTOR,
}  # fmt: skip
"""Temporary errors of making a topic, including too few brokers for its replicas."""

KEPT = {"cleanup.policy": "delete"}
"""Topics of messages must not be compacted, which a broker's default may be: only the last message of a key would stay.
"""
KEEPING = frozenset(("cleanup.policy", "retention.ms", "retention.bytes"))
"""The settings of a topic that determine which records brokers delete."""
COMPACTED = {
    "cleanup.policy": "compact", "segment.bytes": str(16 << 20), "segment.ms": "86400000",
    "min.compaction.lag.ms": "86400000", "min.cleanable.dirty.ratio": "0.1",
}  # fmt: skip
"""A record stays for a day, so that an audit sees that day's records; older ones are compacted soon. By default the
active segment, of 1 GB or a week, is never compacted."""


def translated(error: KafkaError, cluster: Cluster, needs: Needs) -> NotifyError:
    """An error of Kafka's client as an error of Notify, with the remedy.

    Conflict for a fenced publisher, Unauthorized for a refused login or certificate, Forbidden for a missing right,
    InvalidRequest for a setting of the brokers, else Unavailable. If brokers do not answer, finding out why takes some
    seconds.
    """
    code = error.code()
    if code in FENCED:
        return stale_epoch("another bridge of this source publishes now; stop one of the two")
    if refuses(error):
        return refusal(error, cluster)
    if code in AWAY and (reason := why_unreachable(cluster)) is not None:
        return reason
    if (of_setting := bad_setting(error, cluster)) is not None:
        return of_setting
    return missing(error, cluster, needs) or Unavailable(f"Kafka: {error.str()}")


def known_topics(cluster: Cluster, seconds: float = CALL_SECONDS) -> dict[str, TopicMetadata]:
    """The topics that this user may see, by name.

    Raises Unavailable if the brokers do not answer within `seconds`, and Unauthorized as soon as they refuse the login.
    """
    admin = cluster.admin()
    deadline = time.monotonic() + seconds
    while True:
        try:
            return admin.list_topics(timeout=min(seconds, FIRST_ANSWER_SECONDS)).topics
        except KafkaException as raised:
            reason = why_unreachable(cluster)
            if isinstance(reason, Unauthorized):
                raise reason from raised
            if time.monotonic() > deadline:
                silent = Unavailable(f"Kafka at {cluster.brokers} does not answer: {raised.args[0].str()}")
                raise reason or silent from raised


def make_topics(cluster: Cluster, names: list[str], *, compacted: bool = False, largest: int = 0) -> None:
    """Make missing topics, with the number of partitions in the cluster's settings (compacted topics: one).

    `largest`: the largest record that they must accept, in bytes; 0: the brokers' default. Raises Unavailable if the
    brokers do not answer or cannot make them now, InvalidRequest if they refuse.
    """
    config = dict(COMPACTED if compacted else KEPT)
    if largest > LEAST_OF_BROKERS:
        config["max.message.bytes"] = str(largest)
    partitions = 1 if compacted else cluster.partitions
    make_missing(cluster, [new_topic(name, partitions, config) for name in names])


def new_topic(name: str, partitions: int, config: dict[str, str]) -> NewTopic:
    """A topic to make, with the brokers' default number of replicas."""
    return NewTopic(name, num_partitions=partitions, replication_factor=-1, config=config)


def make_missing(cluster: Cluster, wanted: Sequence[NewTopic], *, tells_changed: bool = False) -> list[str]:
    """Make the missing topics of `wanted`. Raises the errors of make_topics.

    `tells_changed`: log where the others do not keep their records as they are wanted to.

    Returns the names of topics that seemed to be missing but exist: another process has made them in the meantime, or
    this user may not see them.
    """
    topics = known_topics(cluster)
    missing = [topic for topic in wanted if topic.topic not in topics]
    admin = cluster.admin()
    bounds = {"request_timeout": CALL_SECONDS, "operation_timeout": CALL_SECONDS}
    answers = admin.create_topics(missing, **bounds) if missing else {}
    existing = []
    for name, answer in answers.items():
        try:
            answered(answer, CALL_SECONDS)
        except KafkaException as raised:
            error = raised.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                existing.append(name)
            elif error.code() in FOR_NOW or error.retriable():
                if error.code() in AWAY and (reason := why_unreachable(cluster)) is not None:
                    raise reason from raised
                raise Unavailable(f"Kafka does not make topic {name!r} now: {error.str()}") from raised
            else:
                raise _not_made(name, error, cluster) from raised
    if tells_changed:
        _tell_changed(admin, [topic for topic in wanted if topic.topic in topics])
    return existing


def _tell_changed(admin: AdminClient, wanted: Sequence[NewTopic]) -> None:
    """Log the settings of existing topics by which brokers delete records that are needed: somebody else has made or
    changed the topics. Settings that this user may not see are left out."""
    configs = {topic.topic: topic.config or {} for topic in wanted}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in configs]
    answers = admin.describe_configs(resources, request_timeout=CALL_SECONDS) if resources else {}
    for resource, answer in answers.items():
        try:
            present = answered(answer, CALL_SECONDS)
        except KafkaException:
            continue
        config = configs[resource.name]
        for setting in KEEPING & config.keys() & present.keys():
            value, wanted_value = str(present[setting].value), config[setting]
            if not _keeps(value, wanted_value):
                log.warning(
                    "topic %s has %s=%s, so Kafka deletes records that Notify still needs: kafka-configs.sh --alter "
                    "--entity-type topics --entity-name %s --add-config %s=%s",
                    resource.name, setting, value, resource.name, setting, wanted_value,
                )  # fmt: skip


def _keeps(value: str, wanted: str) -> bool:
    """Whether a topic with this value of a setting keeps its records at least as long as with the wanted one."""
    if value in (wanted, "-1"):
        return True
    given, least = digits(value), digits(wanted)
    return given is not None and least is not None and given >= least


def _not_made(name: str, error: KafkaError, cluster: Cluster) -> InvalidRequest:
    """The error for a topic that the brokers refuse to make."""
    if error.code() in REFUSED:
        return InvalidRequest(
            f"Kafka shows no topic {name!r} to {user_of(cluster)}, and refuses to make it: grant Create on the topic, "
            "or Describe where it exists",
            "no_topic",
        )
    return InvalidRequest(f"Kafka refuses to make topic {name!r}: {error.str()}. Make it, or rename it", "no_topic")
