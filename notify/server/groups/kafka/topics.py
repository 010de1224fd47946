"""Topics of messages in Kafka for the admin routes, which show them; Kafka's tools change them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

from notify.errors import NotFound
from notify.kafka.topics import whole
from notify.server.groups.kafka import offsets
from notify.server.groups.kafka.answers import CALL_SECONDS, gathered
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.subscriptions import Subscriptions
from notify.server.groups.kafka.thread import BrokersThread

NOT_OF_KAFKA: Mapping[str, Any] = {"flush": None, "ttl": 0.0, "backlog": 0, "backlog_policy": None}
"""The parts of a policy that topics in Kafka do not have; a message may have a time to live."""
KEPT: Mapping[str, Any] = {"retention": None, "retention_bytes": None}
"""The policy of topics that keep everything, or whose settings this user may not read."""


class KafkaTopics:
    """The topics of one cluster. Every method raises Unavailable while the brokers do not answer."""

    def __init__(self, thread: BrokersThread, look: LatestSnapshot, noted: Subscriptions) -> None:
        self._thread = thread
        self._look = look
        self._noted = noted

    async def listed(self, prefix: str, after: str, most: int, *, internal: bool = True) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            message_topics = self._look.now().message_topics()
            names = heapq.nsmallest(most, (name for name in message_topics if name > after and name.startswith(prefix)))
            return {"topics": self._described(names), "of": len(message_topics)}

        return await self._thread.call(ask)

    async def one(self, name: str) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            self._check(name)
            described = self._described([name])
            return described[0]

        return await self._thread.call(ask)

    async def newest_at(self, names: Sequence[str]) -> dict[str, str]:
        return {}  # it would cost a request to the brokers for each partition

    async def groups_of(self, name: str) -> list[dict[str, Any]]:
        def ask() -> list[dict[str, Any]]:
            self._check(name)
            noted = self._noted.read()
            rows = []
            for group in self._look.now().groups.values():
                lags = [position.lag for position in group.positions if position.topic == name]
                modes = {s.mode for place, s in noted.get(group.base, {}).items() if place.topic == name}
                if lags:
                    mode = "broadcast" if group.name != group.base else min(modes, default=None)
                    rows.append({"group": group.name, "mode": mode, "lag": sum(lags)})
            return rows

        return await self._thread.call(ask)

    async def senders_of(self, name: str) -> dict[str, Any]:
        await self.one(name)
        return {"senders": [], "looked_at": 0}  # it would cost a request to the brokers for each partition

    def _check(self, name: str) -> None:
        """Raises NotFound if Kafka has no such topic."""
        if name not in self._look.now().message_topics() and name not in self._look.again().message_topics():
            raise NotFound(f"Kafka has no topic of messages {name[:100]!r}")

    def _described(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of topics; a topic that was deleted meanwhile has no queues."""
        admin = self._thread.brokers.admin
        places = [(name, partition) for name in names for partition in range(self._look.last.topics[name])]
        unknown: set[str] = set()
        starts, ends = offsets.earliest(admin, places, unknown), offsets.latest(admin, places, unknown)
        policies = self._policies(names)
        return [
            {
                "name": name,
                "queues": [
                    {"queue": place[1], "start": starts[place], "end": ends[place]}
                    for place in places
                    if place[0] == name and place in starts and place in ends
                ],
            }
            | policies[name]
            for name in names
        ]

    def _policies(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The policy of each topic by name; None for the retention if this user may not read the topic's settings."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        admin = self._thread.brokers.admin
        asked = admin.describe_configs(resources, request_timeout=CALL_SECONDS) if resources else {}
        policies = {}
        for resource, answer in gathered(asked).items():
            policy = {**NOT_OF_KAFKA, **KEPT}
            if not isinstance(answer, KafkaError):
                kept_ms, most_bytes = whole(answer, "retention.ms"), whole(answer, "retention.bytes")
                policy["retention"] = kept_ms / 1000 if kept_ms is not None and kept_ms >= 0 else None
                policy["retention_bytes"] = most_bytes if most_bytes is not None and most_bytes >= 0 else None
            policies[resource.name] = policy
        return policies
