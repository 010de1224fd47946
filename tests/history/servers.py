"""The servers of a history: one with its own log, or several over databases, with a queue server or Kafka behind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from notify.testing.process import ServerProcess
from tests.support.servers import make_storage, stop_if_running

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
