"""`make cluster-demo`: the demo's shop, unchanged, on MariaDB, three servers, a bridge and a queue; or Kafka.

`DATABASE=mysql` has it on MySQL, `DATABASE=postgresql` on PostgreSQL with a relay. `KAFKA=1` starts three Kafka nodes
instead of the queue server. Nothing but loopback is used, and no Docker.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from rich.console import Console

from notify.cli.demo import as_dict, show_summary
from notify.cli.demo_shop.children import last_lines
from notify.cli.demo_shop.proof import Proof
from notify.cli.demo_shop.run import Demo
from notify.cli.demo_shop.topology import (
    LINES,
    QUICK_CHECKS,
    STOP_SECONDS,
    Topology,
    ended_codes,
    group_lag,
    last_lines_of,
    metric,
    start_server,
    transaction,
    undecided,
)
from notify.errors import NotifyError
from notify.storage.sql import schema
from notify.storage.sql.engines import open_engine
from notify.testing.databases import SERVERS
from notify.testing.process import ServerProcess
from notify.testing.reachable import NotAvailable
from tests.support.verdict import judged
from tools.kafka_cluster import KafkaCluster

SERVER_COUNT = 3


class Cluster:
    """Three stateless servers on a database, and a bridge (or relay) to a queue server or to Kafka."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack, kafka_url: str | None = None) -> None:
        """`storage`: an empty database of PostgreSQL, MySQL or MariaDB. Raises NotifyError if a part does not start."""
        engine = open_engine(storage)
        schema.upgrade(engine, "main")
        engine.dispose()
        self._servers = []
        for number in range(SERVER_COUNT):
            flags = ["--storage", storage]
            server = ServerProcess(directory / f"server-{number}", environment=QUICK_CHECKS, flags=flags)
            start_server(server, f"server {number + 1}")
            stack.callback(server.stop, STOP_SECONDS)
            self._servers.append(server)
        self._storage = storage
        self._queue: ServerProcess | None = None
        if kafka_url is None:
            flags = ["--registry", storage, "--roles", "queue"]
            self._queue = ServerProcess(directory / "queue", flags=flags)
            start_server(self._queue, "queue")
            stack.callback(self._queue.stop, STOP_SECONDS)
            target = self._queue.url
        else:
            target = kafka_url
        mover = "relay" if storage.startswith("postgresql") else "bridge"
        self._mover = [sys.executable, "-m", "notify.cli.main", mover, "--dsn", storage, "--url", target]
        self._mover_name = mover
        self._mover_output = directory / mover
        self._output = self._mover_output.open("ab")
        stack.callback(self._output.close)
        self._mover_process = self._start_mover()
        stack.callback(self._stop_mover)
        # Clients discover all other servers and the queue through any server.
        self.producer_url = self._servers[0].url
        self.consumer_url = kafka_url or self._servers[0].url

    def _start_mover(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._mover, stdout=self._output, stderr=self._output)

    def _stop_mover(self) -> None:
        self._mover_process.kill()
        self._mover_process.wait()

    @property
    def _urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def parts(self) -> list[str]:
        return ["server", self._mover_name] + (["queue"] if self._queue is not None else [])

    def kill(self, part: str) -> None:
        if part == "server":
            server = random.choice(self._servers)
            server.kill()
            start_server(server, part)
        elif part == "queue" and self._queue is not None:
            self._queue.kill()
            start_server(self._queue, part)
        else:
            self._stop_mover()
            self._mover_process = self._start_mover()

    @property
    def _processes(self) -> dict[str, ServerProcess]:
        servers = {f"server {number}": server for number, server in enumerate(self._servers, 1)}
        return servers | ({} if self._queue is None else {"queue": self._queue})

    def ended(self) -> dict[str, int]:
        code = self._mover_process.poll()
        return ended_codes(self._processes) | ({} if code is None else {self._mover_name: code})

    def last_words(self) -> dict[str, list[str]]:
        return last_lines_of(self._processes) | {self._mover_name: last_lines(self._mover_output, LINES)}

    def undecided(self) -> list[dict[str, Any]]:
        return undecided(self._urls)

    def lag(self, unsettled: int) -> int:
        return unsettled if self._queue is None else max(unsettled, group_lag(self._queue.url))

    def transaction(self, transaction_id: str) -> dict[str, Any]:
        return transaction(self._urls, transaction_id)

    def redelivered(self) -> int:
        return 0 if self._queue is None else metric(self._queue.url, "notify_redelivered_total")

    def audit_flags(self) -> list[str]:
        queue = ["--kafka", self.consumer_url] if self._queue is None else ["--log", str(self._queue.data_dir)]
        return ["--storage", self._storage, *queue]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kafka", action="store_true")
    parser.add_argument("--database", choices=sorted(SERVERS), default="mariadb")
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--audit", type=Path, help="audit it at the end; the report's directory")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    console = Console(stderr=a.json)
    with ExitStack() as stack:
        try:
            url = stack.enter_context(SERVERS[a.database]())
            console.print(f"{a.database} is up")
            kafka = None
            if a.kafka:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-kafka-")))
                cluster = KafkaCluster(directory, nodes=3).start()
                stack.callback(cluster.stop)
                kafka = cluster.url
                console.print("three Kafka nodes are up")
        except (NotAvailable, NotifyError) as error:
            console.print(f"VERDICT: INCONCLUSIVE {error}")
            return 2
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for name in ("notify_server", "cluster_shop"):
                connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        storage, shop = (
            sa.make_url(url).set(database=name).render_as_string(hide_password=False)
            for name in ("notify_server", "cluster_shop")
        )

        def topology(directory: Path, stack: ExitStack) -> Topology:
            return Cluster(storage, directory, stack, kafka)

        acts: list[str] = []

        def report(_: Proof, act: str) -> None:
            if not acts or acts[-1] != act:
                acts.append(act)
                console.print(act)

        proof = Demo(shop, a.seconds, a.seed, report, topology, a.audit).run()
    if a.json:
        print(json.dumps(as_dict(proof)))
    else:
        show_summary(console, proof, a.audit)
    return 0 if proof.ok else 1


if __name__ == "__main__":
    sys.exit(judged(main))
