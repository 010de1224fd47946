"""The bridge to Kafka beside a plain transactional producer (Python, confluent-kafka): rows per second, CPU per row.

One Kafka node and one MariaDB or MySQL, whose binlog has single-row transactions. Bridge and producer publish by turns,
each in a process of its own: the same number of records of the same bytes, in transactions of the same size. Ratios are
those of one round, because a machine's speed changes from minute to minute. Each bridge's run is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.binlog_bridge.batching import BATCH_TRANSACTIONS
from notify.binlog_bridge.binlog import source
from notify.cli.bench.runner import Process
from notify.client.tables.creation import create_tables
from notify.errors import NotifyError
from notify.kafka.cluster import Cluster
from notify.kafka.records import ID, header, listed
from notify.movers.sinks.kafka import KafkaSink
from notify.protocol.wire import PackedBridgeBatch
from notify.runtime.signals import exit_on_signal
from notify.testing.binlog_server import BinlogServer
from notify.testing.databases import BINLOG_SERVERS
from tools.bench.bridge import TOPIC, write
from tools.kafka_cluster import KafkaCluster

PLAIN_TOPIC = "bench-plain"
KINDS = ("bridge", "plain")
RUN_SECONDS = 300.0
READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows` of `body` bytes, `batch` of them in each transaction of the plain producer."""

    rows: int
    body: int
    batch: int
    rounds: int
    database: str = "mariadb"


def written(database: BinlogServer, plan: Plan) -> str:
    """Fill the binlog; the position before its rows."""
    engine = sa.create_engine(database.url)
    create_tables(engine)
    with engine.connect() as connection:
        position = source.current_position(connection).text
    write(sa.make_url(database.url), plan.rows, plan.body)
    engine.dispose()
    return position


async def _stand_at(url: str, name: str, position: str) -> None:
    sink = KafkaSink(url)
    epoch, before = await sink.claim(name)
    await sink.append(name, PackedBridgeBatch(epoch, before, position))
    await sink.close()


def ends(cluster: Cluster, topic: str) -> dict[int, int]:
    """The offset behind the last committed record of each partition; none where there is no topic."""
    from confluent_kafka import TopicPartition

    consumer = cluster.consumer({"group.id": "bench-ends"})
    try:
        known = consumer.list_topics(timeout=READ_SECONDS).topics.get(topic)
        return {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=READ_SECONDS)[1]
            for number in (known.partitions if known is not None else ())
        }
    finally:
        consumer.close()


def published(cluster: Cluster, topic: str, before: dict[int, int]) -> list[str | None]:
    """The ids of the committed records behind offsets."""
    from confluent_kafka import KafkaError, TopicPartition

    consumer = cluster.consumer({"group.id": "bench-verify", "enable.partition.eof": True})
    try:
        until = ends(cluster, topic)
        consumer.assign([TopicPartition(topic, number, before.get(number, 0)) for number in until])
        names: list[str | None] = []
        open_ones = set(until)
        while open_ones:
            records = consumer.consume(10_000, READ_SECONDS)
            if not records:
                raise NotifyError(f"Kafka gave no record of {topic} for {READ_SECONDS:g} s")
            for record in records:
                error = record.error()
                if error is None:
                    names.append(header(listed(record), ID))
                elif error.code() == KafkaError._PARTITION_EOF:
                    open_ones.discard(record.partition())
        return names
    finally:
        consumer.close()


def measured(database: BinlogServer, cluster: Cluster, plan: Plan, kind: str, number: int) -> dict[str, Any]:
    """The figures of one run. `number`: of this bench's runs."""
    topic = TOPIC if kind == "bridge" else PLAIN_TOPIC
    before = ends(cluster, topic)
    spec = {
        "kind": kind, "dsn": database.url, "brokers": cluster.brokers, "source": f"bench-{number}", "topic": topic,
        "rows": plan.rows, "body": plan.body, "batch": plan.batch,
    }  # fmt: skip
    figures = Process("tools.bench.kafka.published", spec).result(RUN_SECONDS)
    names = published(cluster, topic, before)
    return figures | {"lost": plan.rows - len(set(names)), "duplicated": len(names) - len(set(names))}


def run(plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """The figures of each run, by kind; prints each."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="notify-bench-") as directory, contextlib.ExitStack() as stack:
        place = Path(directory) / "database"
        place.mkdir()
        database = BINLOG_SERVERS[plan.database](place, durable=False).create()
        stack.callback(database.stop)
        nodes = KafkaCluster(Path(directory) / "kafka").start()
        stack.callback(nodes.stop)
        cluster = Cluster.of(nodes.url)
        position = written(database, plan)
        number = 0
        for round_ in range(plan.rounds):
            for kind in KINDS[round_ % 2 :] + KINDS[: round_ % 2]:
                number += 1
                if kind == "bridge":
                    asyncio.run(_stand_at(nodes.url, f"bench-{number}", position))
                figures = measured(database, cluster, plan, kind, number)
                runs[kind].append(figures)
                print(
                    f"{kind:8} {figures['per_second']:9,.0f} rows/s {figures['cpu_us']:6.1f} µs of CPU a row "
                    f"{figures['batches']:5} transactions; lost {figures['lost']}, doubled {figures['duplicated']}",
                    flush=True,
                )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--body", type=int, default=256, help="bytes")
    parser.add_argument("--batch", type=int, default=BATCH_TRANSACTIONS, help="rows of a plain transaction")
    parser.add_argument("--database", choices=sorted(BINLOG_SERVERS), default="mariadb")
    given = parser.parse_args()
    runs = run(Plan(given.rows, given.body, given.batch, given.rounds, given.database))
    rates = {kind: [figures["per_second"] for figures in runs[kind]] for kind in KINDS}
    shares = [bridge / plain for bridge, plain in zip(rates["bridge"], rates["plain"], strict=True)]
    print(f"\n{given.rounds} rounds, {given.rows:,} rows of {given.body} bytes:")
    for kind in KINDS:
        cpu = statistics.median([figures["cpu_us"] for figures in runs[kind]])
        print(
            f"{kind:8} {statistics.median(rates[kind]):9,.0f} rows/s ({min(rates[kind]):,.0f} to "
            f"{max(rates[kind]):,.0f}), {cpu:.1f} µs of CPU a row"
        )
    print(f"bridge to plain: {statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})")
    if any(figures["lost"] or figures["duplicated"] for kind in KINDS for figures in runs[kind]):
        raise NotifyError("records were lost or doubled: see the lines above")


if __name__ == "__main__":
    with exit_on_signal():
        main()
