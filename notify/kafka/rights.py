"""The rights (ACLs) that each part of Notify needs from Kafka's brokers. docs/kafka-rights.md has this table, too.

Read, Write and Delete imply Describe. A name that ends with `*` is the beginning of names (a prefixed ACL).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from confluent_kafka import KafkaError

from notify.errors import Forbidden
from notify.kafka.cluster import Cluster

TOPIC, GROUP, TRANSACTIONAL_ID, CLUSTER = "topic", "group", "transactional id", "cluster"
REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: TOPIC,
    KafkaError.GROUP_AUTHORIZATION_FAILED: GROUP,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: TRANSACTIONAL_ID,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: CLUSTER,
}
"""The kind of resource that an error is about; the brokers do not tell its name."""


class Need(NamedTuple):
    """Operations on a resource, or on all whose names begin alike. `why`: the purpose."""

    kind: str
    name: str
    operations: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        operations = " and ".join(self.operations)
        if self.name == "*":
            return f"{operations} on every {self.kind}"
        if self.name.endswith("*"):
            return f"{operations} on {self.kind}s that begin with {self.name[:-1]}"
        return f"{operations} on {self.kind} {self.name}"


class Needs(NamedTuple):
    """The needs of one role."""

    role: str
    needs: tuple[Need, ...]

    def of(self, kind: str) -> list[Need]:
        return [need for need in self.needs if need.kind == kind]


def of_bridge(source: str = "SOURCE", topics: Iterable[str] = ("TOPIC",)) -> Needs:
    """The needs of a bridge or relay that publishes a source's messages to these topics."""
    published = tuple(
        Need(TOPIC, name, ("Write", "Create", "DescribeConfigs"), "messages; a topic that is missing is made")
        for name in topics
    )
    return Needs(
        "bridge",
        (
            *published,
            Need(
                TOPIC,
                f"notify-bridge-positions.{source}",
                ("Read", "Write", "Create", "DescribeConfigs"),
                "the source's position",
            ),
            Need(
                TOPIC, "notify-delayed*", ("Read", "Write", "Create", "Delete", "DescribeConfigs"), "delayed messages"
            ),
            Need(
                TOPIC,
                "notify-refused",
                ("Write", "Create"),
                "how many messages are refused, for a server that shows it",
            ),
            Need(GROUP, "notify-delay*", ("Read",), "who releases delayed messages"),
            Need(GROUP, "notify-positions", ("Read",), "reading the position"),
            Need(TRANSACTIONAL_ID, f"notify-bridge-{source}", ("Write",), "one publisher a source"),
            Need(TRANSACTIONAL_ID, "notify-delays*", ("Write",), "delayed messages move once"),
        ),
    )


def of_consumer(group: str = "GROUP", topics: Iterable[str] = ("TOPIC",)) -> Needs:
    """The needs of a consumer of these topics."""
    read = tuple(Need(TOPIC, name, ("Read",), "messages") for name in topics)
    return Needs(
        "consumer",
        (
            *read,
            Need(TOPIC, f"retry.{group}", ("Read", "Write", "Create"), "messages that failed"),
            Need(TOPIC, f"dead-letter.{group}", ("Write", "Create"), "dead letters"),
            Need(TOPIC, "notify-control", ("Read", "Create"), "pauses and resets"),
            Need(TOPIC, "notify-subscriptions", ("Read", "Write", "Create"), "the group's subscriptions, for audits"),
            Need(TOPIC, f"notify-owner.{group}", ("Read", "Create"), "the owner, in modes exclusive and failover"),
            Need(GROUP, f"{group}*", ("Read",), "positions"),
            Need(GROUP, f"notify-owner.{group}", ("Read",), "the owner, in modes exclusive and failover"),
            Need(GROUP, "notify-positions", ("Read",), "reading the group's notes"),
            Need(TRANSACTIONAL_ID, f"notify-group.{group}*", ("Write",), "a failed message moves once"),
        ),
    )


def of_reader(topic: str) -> Needs:
    """The needs of a reader of one of Notify's own topics."""
    return Needs(
        "reader", (Need(TOPIC, topic, ("Read",), "its records"), Need(GROUP, "notify-positions", ("Read",), "reading"))
    )


def of_server() -> Needs:
    """The needs of a server that shows and steers all groups."""
    return Needs(
        "server",
        (
            Need(TOPIC, "*", ("Describe",), "the ends of topics, for the lag; with Read the age of the oldest message"),
            Need(TOPIC, "dead-letter.*", ("Read", "Delete"), "dead letters, and purges of them"),
            Need(TOPIC, "retry.*", ("Write",), "redrives"),
            Need(TOPIC, "notify-*", ("Read",), "positions, subscriptions, pauses, redrives"),
            Need(TOPIC, "notify-control", ("Write", "Create"), "pauses and resets"),
            Need(TOPIC, "notify-redriven", ("Write", "Create"), "each dead letter is sent again once"),
            Need(TOPIC, "notify-dropped", ("Write", "Create"), "dropped dead letters"),
            Need(GROUP, "*", ("Describe",), "positions and members of groups"),
            Need(GROUP, "notify-*", ("Read",), "reading topics"),
            Need(TRANSACTIONAL_ID, "notify-control", ("Write",), "one change at a time"),
            Need(TRANSACTIONAL_ID, "notify-redrive-*", ("Write",), "redrives"),
        ),
    )


def of_decider() -> Needs:
    """The needs of `notify refused --dsn kafka://…`."""
    return Needs(
        "person who decides about refused messages",
        (
            Need(TOPIC, "TOPIC", ("Write", "Create"), "messages that are sent after all"),
            Need(TOPIC, "notify-delayed.refused", ("Read",), "the messages"),
            Need(TOPIC, "notify-undelivered", ("Read", "Write", "Create"), "the decisions"),
            Need(GROUP, "notify-*", ("Read",), "reading topics"),
            Need(TRANSACTIONAL_ID, "notify-undelivered", ("Write",), "each message is sent once"),
        ),
    )


def of_sweep() -> Needs:
    """The needs of `notify store sweep`."""
    return Needs(
        "sweep of stored bodies",
        (
            Need(TOPIC, "*", ("Read",), "every record that may name a body"),
            Need(CLUSTER, "kafka-cluster", ("Describe",), "the rights, which say whether topics are hidden"),
            Need(GROUP, "notify-positions", ("Read",), "reading topics"),
        ),
    )


def of_audit() -> Needs:
    """The needs of an audit of all topics and groups."""
    return Needs(
        "audit",
        (
            Need(TOPIC, "*", ("Read", "DescribeConfigs"), "every message"),
            Need(GROUP, "*", ("Describe",), "positions of groups"),
            Need(GROUP, "notify-audit", ("Read",), "reading topics"),
            Need(GROUP, "notify-positions", ("Read",), "reading the subscriptions and redrives"),
        ),
    )


def missing(error: KafkaError, cluster: Cluster, needs: Needs) -> Forbidden | None:
    """The error for a missing right, with the rights to grant; None if the client's error is another one."""
    kind = REFUSED.get(error.code())
    if kind is None:
        return None
    wanted = "; ".join(str(need) for need in needs.of(kind)) or "IdempotentWrite on the cluster"
    reason = f"Kafka at {cluster.brokers} refuses {user_of(cluster)} a {kind} ({error.str()})"
    return Forbidden(f"{reason}; grant it what the {needs.role} needs: {wanted}")


def user_of(cluster: Cluster) -> str:
    """The user that the brokers know this client as, by its settings."""
    user = cluster.settings.get("sasl.username")
    return f"user {user!r}" if user else "this client"
