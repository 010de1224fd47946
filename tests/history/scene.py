"""The scene of a history: its servers, what is there before anything of Notify's runs, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.protocol.workers import worker_names
from notify.testing.process import ServerProcess
from tests.support.kafka_proxy import KafkaProxy
from tests.support.servers import make_storage, stop_if_running
from tools.kafka_cluster import KafkaCluster

SERVERS_OVER_DATABASES = 2


class Servers:
    """Servers by name; `queue` shows and steers the groups, `senders` take what producers send."""

    def __init__(self, queue: ServerProcess, senders: Mapping[str, ServerProcess], kafka_url: str = "") -> None:
        """`kafka_url`: the cluster that has the queues; "" where the server `queue` has them."""
        self.queue = queue
        self.senders = dict(senders)
        self.by_name = {"server": queue, **self.senders}
        self.kafka_url = kafka_url

    @property
    def queue_url(self) -> str:
        """Where bridges and relays publish, and consumers receive."""
        return self.kafka_url or self.queue.url

    @property
    def send_url(self) -> str:
        """Where producers send."""
        return ",".join(server.url for server in self.senders.values())

    def start(self, stack: ExitStack) -> None:
        """Start all of them; the stack stops them."""
        for server in {id(server): server for server in self.by_name.values()}.values():
            server.start()
            stack.callback(stop_if_running, server)


def with_workers(directory: Path, workers: int) -> Servers:
    """One server of so many workers, each of which has a log."""
    server = ServerProcess(directory / "data", flags=["--workers", str(workers)])
    return Servers(server, {"server": server})


def with_a_log(directory: Path, registry: str | None) -> Servers:
    """One server whose log has transactions and queues. `registry`: the database that it keeps its registry in."""
    if registry is not None:
        make_storage(registry)
    server = ServerProcess(directory / "data", flags=[] if registry is None else ["--registry", registry])
    return Servers(server, {"server": server})


def over_databases(directory: Path, storages: Mapping[str, str], kafka_url: str = "") -> Servers:
    """Servers that store transactions in databases, shard by shard (`storages`: URLs by shard), and a queue server.

    The registry is in the first shard. `kafka_url`: a cluster that has the queues, whose groups that server shows.
    """
    for shard, url in storages.items():
        make_storage(url, shard)
    flags = ["--storage", " ".join(f"{shard}={url}" for shard, url in storages.items())]
    senders = {
        f"server over databases {n}": ServerProcess(directory / f"sql-{n}", flags=flags)
        for n in range(SERVERS_OVER_DATABASES)
    }
    if kafka_url:
        return Servers(ServerProcess(directory / "data", flags=["--kafka", kafka_url]), senders, kafka_url)
    registry = storages[min(storages)]
    queue = ServerProcess(directory / "data", flags=["--registry", registry, "--roles", "queue"])
    return Servers(queue, senders)


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
