"""The queue engine of a Kafka cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from notify.kafka.cluster import Cluster
from notify.server.core.refusals import Refusals
from notify.server.groups import QueueEngine
from notify.server.groups.kafka.counts import KafkaCounts
from notify.server.groups.kafka.dead_letters import KafkaLetters
from notify.server.groups.kafka.groups import KafkaGroups
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.subscriptions import Subscriptions
from notify.server.groups.kafka.thread import BrokersThread
from notify.server.groups.kafka.topics import KafkaTopics
from notify.server.letters.letters import Letters


@contextlib.asynccontextmanager
async def kafka_engine(cluster: Cluster, refusals: Refusals) -> AsyncIterator[QueueEngine]:
    """The engine of a cluster for administrators. `refusals`: the reports of movers to this server.

    Raises InvalidRequest if Kafka's client refuses the settings.
    """
    thread = BrokersThread(cluster)
    look, noted = LatestSnapshot(thread.brokers), Subscriptions(thread.brokers)
    letters = KafkaLetters(thread, look)
    groups = KafkaGroups(thread, look, noted, letters, refusals)

    def close_parts() -> None:
        letters.close_clients()
        for part in (groups, noted, look):
            part.close()

    try:
        yield QueueEngine(groups, Letters(letters, letters.counts), KafkaTopics(thread, look, noted), KafkaCounts(look))
    finally:
        await thread.close(close_parts)
