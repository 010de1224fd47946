"""A cluster as its brokers describe it at one moment: brokers, topics, and the settings of both."""

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
    """`brokers`: `host:port` by id, as clients are told. `settings`: of a broker, `configs`: of topics.

    Both lack those that this user may not see.
    """

    cluster: Cluster
    controller: int
    brokers: Mapping[int, str]
    topics: Mapping[str, Any]
    settings: Mapping[int, Mapping[str, str]]
    configs: Mapping[str, Mapping[str, str]]

    @classmethod
    def look(cls, cluster: Cluster) -> Seen:
        """Raises Unavailable where the brokers do not answer, Unauthorized where they refuse."""
        admin = cluster.admin()
        try:
            known = admin.list_topics(timeout=CALL_SECONDS)
            topics = {name: topic for name, topic in known.topics.items() if not name.startswith("__")}
            brokers = {number: f"{b.host}:{b.port}" for number, b in known.brokers.items()}
            settings = _configs(admin, ResourceType.BROKER, [str(number) for number in brokers])
            configs = _configs(admin, ResourceType.TOPIC, list(topics))
        except KafkaException as raised:
            raise translated(raised.args[0], cluster, NEEDS) from raised
        except TimeoutError:
            raise Unavailable(f"Kafka at {cluster.brokers} does not answer within {CALL_SECONDS:g} s") from None
        by_number = {int(number): values for number, values in settings.items()}
        return cls(cluster, known.controller_id, brokers, topics, by_number, configs)

    def own_topics(self) -> list[str]:
        return [name for name in self.topics if name.startswith(OWN_TOPICS)]

    def message_topics(self) -> list[str]:
        return [name for name in self.topics if not name.startswith(OWN_TOPICS)]

    def setting(self, name: str, topic: str) -> str:
        """A topic's setting; "" where this user may not see it."""
        return self.configs.get(topic, {}).get(name, "")


def _configs(admin: Any, kind: Any, names: list[str]) -> dict[str, dict[str, str]]:
    """The settings of resources by name; one that may not be seen is left out. Raises TimeoutError."""
    if not names:
        return {}
    asked = admin.describe_configs([ConfigResource(kind, name) for name in names], request_timeout=CALL_SECONDS)
    configs = {}
    for resource, answer in asked.items():
        try:
            configs[resource.name] = {name: c.value or "" for name, c in answer.result(CALL_SECONDS + 1).items()}
        except KafkaException:
            continue
    return configs
