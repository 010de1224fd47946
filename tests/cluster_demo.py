"""`make cluster-demo`: the demo's shop, unchanged, on MariaDB, three servers, a bridge and a queue; or Kafka.

`DATABASE=mysql` has it on MySQL, `DATABASE=postgresql` on PostgreSQL with a relay. `KAFKA=1` starts three Kafka nodes
instead of the queue server. Nothing but loopback is used, and no Docker.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy as sa
from rich.console import Console

from notify.cli.demo import as_dict, show_summary
from notify.cli.demo_shop.kafka import KafkaCluster
from notify.cli.demo_shop.proof import Proof
from notify.cli.demo_shop.run import Demo
from notify.cli.demo_shop.topology import Cluster, Topology
from notify.errors import NotifyError
from notify.testing.databases import SERVERS
from notify.testing.reachable import NotAvailable
from tests.support.verdict import judged


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
