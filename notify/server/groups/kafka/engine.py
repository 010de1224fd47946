"""The queue engine of a Kafka cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from notify.errors import NotFound
from notify.kafka.cluster import Cluster
from notify.server.core.reports import RefusedReports
from notify.server.groups import QueueEngine
from notify.server.groups.kafka.dead_letters import KafkaLetters
from notify.server.groups.kafka.groups import KafkaGroups
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
from notify.server.groups.kafka.subscriptions import Subscriptions
from notify.server.groups.kafka.thread import BrokersThread
from notify.server.groups.kafka.topics import KafkaTopics
from notify.server.letters.letters import Letters
from notify.server.watch.figures import Counts


class KafkaCounts:
    """Lags only: rates and ages would need requests to the brokers each minute."""

    def __init__(self, look: LatestSnapshot) -> None:
        self._look = look

    def topics(self) -> Sequence[str]:
        return ()

    def topic(self, name: str) -> Counts:
        if name not in self._look.last.message_topics():
            raise NotFound(f"Kafka has no topic of messages {name[:100]!r}")
        lags = [sum(p.lag for p in g.positions if p.topic == name) for g in self._look.last.groups.values()]
        return Counts(None, max(lags, default=None))

    def groups(self) -> Sequence[str]:
        return list(self._look.last.groups)

    def group(self, name: str) -> Counts:
        group = self._look.last.groups.get(name)
        if group is None:
            raise NotFound(f"Kafka has no group {name[:100]!r}")
        return Counts(None, group.lag)


@contextlib.asynccontextmanager
async def kafka_engine(cluster: Cluster, refusals: RefusedReports) -> AsyncIterator[QueueEngine]:
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
