"""Seen: the state of a Kafka cluster at one moment: brokers, topics, and the settings of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

from notify.errors import Unavailable
from notify.kafka.brokers import CALL_SECONDS, translated
from notify.kafka.cluster import Cluster
from notify.kafka.groups import OWN_TOPICS
from notify.kafka.rights import CLUSTER, Need, Needs

NEEDS = Needs("doctor", (Need(CLUSTER, "", ("DescribeConfigs",), "the settings of brokers"),))


@dataclass(frozen=True, slots=True)
class Seen:
    """`brokers`: the advertised `host:port` of each broker, by id. `settings`: the settings of each broker; `configs`:
    those of each topic. Both lack the settings that this user may not see.
    """

    cluster: Cluster
    controller: int
    brokers: Mapping[int, str]
    topics: Mapping[str, Any]
    settings: Mapping[int, Mapping[str, str]]
    configs: Mapping[str, Mapping[str, str]]

    @classmethod
    def look(cls, cluster: Cluster) -> Seen:
        """Read the state. Raises Unavailable if the brokers do not answer, Unauthorized if they refuse."""
        admin = cluster.admin()
        try:
            metadata = admin.list_topics(timeout=CALL_SECONDS)
            topics = {name: topic for name, topic in metadata.topics.items() if not name.startswith("__")}
            brokers = {number: f"{broker.host}:{broker.port}" for number, broker in metadata.brokers.items()}
            settings = _configs(admin, ResourceType.BROKER, [str(number) for number in brokers])
            configs = _configs(admin, ResourceType.TOPIC, list(topics))
        except KafkaException as raised:
            raise translated(raised.args[0], cluster, NEEDS) from raised
        except TimeoutError:
            raise Unavailable(f"Kafka at {cluster.brokers} does not answer within {CALL_SECONDS:g} s") from None
        by_number = {int(number): values for number, values in settings.items()}
        return cls(cluster, metadata.controller_id, brokers, topics, by_number, configs)

    def own_topics(self) -> list[str]:
        return [name for name in self.topics if name.startswith(OWN_TOPICS)]

    def message_topics(self) -> list[str]:
        return [name for name in self.topics if not name.startswith(OWN_TOPICS)]

    def setting(self, name: str, topic: str) -> str:
        """A topic's setting; "" if this user may not see it."""
        return self.configs.get(topic, {}).get(name, "")


def _configs(admin: Any, kind: Any, names: list[str]) -> dict[str, dict[str, str]]:
    """The settings of resources, by name; resources that this user may not see are left out. Raises TimeoutError."""
    if not names:
        return {}
    answers = admin.describe_configs([ConfigResource(kind, name) for name in names], request_timeout=CALL_SECONDS)
    configs = {}
    for resource, answer in answers.items():
        try:
            configs[resource.name] = {name: c.value or "" for name, c in answer.result(CALL_SECONDS + 1).items()}
        except KafkaException:
            continue
    return configs
