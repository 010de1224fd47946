"""The figures of Kafka's groups for charts, from the newest snapshot, without requests to the brokers."""

from __future__ import annotations

from collections.abc import Sequence

from notify.errors import NotFound
from notify.server.groups.kafka.latest_snapshot import LatestSnapshot
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
