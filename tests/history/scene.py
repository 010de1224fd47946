"""The scene of a history: what is there before anything of Notify's runs, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.cli.demo_shop.kafka import KafkaCluster
from notify.protocol.workers import worker_names
from tests.history.servers import Servers, over_databases, with_a_log, with_workers
from tests.support.kafka_proxy import KafkaProxy


@dataclass(frozen=True, slots=True)
class Scene:
    """Databases, and perhaps a Kafka cluster."""

    sources: Mapping[str, str]
    """Database URLs by name: producers and consumers of services use them."""
    databases: Mapping[str, Any] = field(default_factory=dict)
    """The servers of those databases that may be restarted."""
    callers: int = 4
    """Callers of each producer."""
    most_delay: float = 5.0
    """The longest delay of a message, in seconds."""
    is_over_databases: bool = False
    """Whether the same databases store the servers' transactions, each a shard."""
    has_wal_bridge: bool = False
    """Whether a bridge, and no relay, moves what is in a PostgreSQL, whose log is logical then."""
    kafka: KafkaCluster | None = None
    """The cluster that has the queues; it needs `is_over_databases`."""
    proxies: Sequence[KafkaProxy] = ()
    """The proxies before its nodes."""
    workers: int = 1
    """Workers of the server with a log; more than one know no registry."""
    pause: float = 0.0
    """Seconds between two intents of a caller. A short history needs no more than some hundred messages, each of which
    costs a transaction in every group."""
    slower: float = 1.0
    """Pauses between faults are so many times as long: a process that is killed takes a second of CPU to start."""
    groups: Sequence[str] = ()
    """The groups that take part; (): all."""

    @property
    def logs(self) -> Sequence[str]:
        """The names of the logs behind one port; (): there is one."""
        return worker_names(self.workers) if self.workers > 1 else ()

    def servers(self, directory: Path) -> Servers:
        """The servers, not started yet. The registry is in one of the databases, so it is unreachable while that
        restarts."""
        if self.is_over_databases:
            return over_databases(directory, self.sources, "" if self.kafka is None else self.kafka.url)
        if self.workers > 1:
            return with_workers(directory, self.workers)
        return with_a_log(directory, next((dsn for dsn in self.sources.values() if not dsn.startswith("sqlite")), None))
