"""Questions of audits and check-ups about groups, which a child process asks Kafka's brokers (admin_process.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from notify.kafka.calls import gathered
from notify.kafka.progress import Progress
from notify.kafka.subscriptions import Place

CALL_SECONDS = 15.0
"""How long the brokers may take to answer. A question makes at most two consecutive calls."""


def progress_of_all(admin: AdminClient) -> dict[str, dict[Place, Progress]]:
    """The progress of every Kafka group with committed offsets, by partition. Raises KafkaException, TimeoutError."""
    listed = _result(gathered({"": admin.list_consumer_groups(request_timeout=CALL_SECONDS)}, CALL_SECONDS)[""])
    if listed.errors:  # of brokers that did not answer: their groups are not in the list
        raise KafkaException(listed.errors[0])
    return progress_of(admin, [group.group_id for group in listed.valid])


def progress_of(admin: AdminClient, groups: Iterable[str]) -> dict[str, dict[Place, Progress]]:
    """The progress of these groups that have committed offsets, by partition. Raises KafkaException, TimeoutError."""
    calls = {
        group: admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], request_timeout=CALL_SECONDS)[
            group
        ]
        for group in groups
    }
    progress = {}
    for group, answer in gathered(calls, CALL_SECONDS).items():
        committed = [p for p in _result(answer).topic_partitions or [] if p.offset >= 0]
        if committed:
            progress[group] = {Place(p.topic, p.partition): Progress.of(p.offset, p.metadata) for p in committed}
    return progress


def hidden_among(admin: AdminClient, groups: Iterable[str]) -> list[str]:
    """Those of these groups that this user may not see: a list of all groups leaves them out.

    Raises KafkaException, TimeoutError."""
    calls = {
        group: admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], request_timeout=CALL_SECONDS)[
            group
        ]
        for group in groups
    }
    hidden = []
    for group, answer in sorted(gathered(calls, CALL_SECONDS).items()):
        if isinstance(answer, KafkaError) and answer.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            hidden.append(group)
        else:
            _result(answer)
    return hidden


def operations_on(admin: AdminClient, group: str) -> frozenset[str] | None:
    """The names of the operations that this user may do with a group; None if the brokers do not tell.

    Raises KafkaException, TimeoutError.
    """
    calls = admin.describe_consumer_groups([group], include_authorized_operations=True, request_timeout=CALL_SECONDS)
    allowed = _result(gathered(calls, CALL_SECONDS)[group]).authorized_operations
    return None if allowed is None else frozenset(operation.name for operation in allowed)


def _result(answer: Any) -> Any:
    if isinstance(answer, KafkaError):
        raise KafkaException(answer)
    return answer
