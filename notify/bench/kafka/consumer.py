"""Consumers over Kafka beside a plain client of Kafka: messages a second of empty handlers, and CPU time for each.

One node, one topic that a publisher's transactions have filled, and consumers by turns, each in a process of its own
with a group of its own. Ratios are those of one round, because a machine's speed changes from minute to minute.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify import ids
from notify.bench import children
from notify.demo.kafka import KafkaCluster
from notify.ending import exiting_when_told
from notify.kafka.cluster import Cluster
from notify.kafka.records import GROUP, ID, Headers

TOPIC = "bench"
KEYS = 1000
BATCH = 500
"""Messages of a transaction of the publisher."""
CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A consumer: `plain` of Kafka's client, or Notify's in a mode. `batch`: None for the default."""

    name: str
    mode: str
    is_async: bool = True
    batch: int | None = None


KINDS = (
    Kind("plain", "plain"),
    Kind("shared, async", "shared"),
    Kind("shared, async, batch 1000", "shared", batch=1000),
    Kind("shared, threads", "shared", is_async=False),
    Kind("shared, threads, batch 1000", "shared", is_async=False, batch=1000),
    Kind("ordered, async", "ordered"),
)


def fill(cluster: Cluster, messages: int, partitions: int, body: int) -> None:
    """Make the topic, and publish messages as a bridge does: in transactions, with ids and keys."""
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    admin = cluster.admin()
    for made in admin.create_topics([NewTopic(TOPIC, num_partitions=partitions, replication_factor=-1)]).values():
        made.result(CALL_SECONDS)
    producer = cluster.producer({"transactional.id": "bench", "linger.ms": 5})
    producer.init_transactions(CALL_SECONDS)
    for start in range(0, messages, BATCH):
        producer.begin_transaction()
        for number in range(start, min(start + BATCH, messages)):
            headers: Headers = [(ID, f"{ids.to_text(ids.new_id())}.0".encode()), (GROUP, b"bench")]
            producer.produce(TOPIC, os.urandom(body), f"{number % KEYS}".encode(), headers=headers)
            producer.poll(0)
        producer.commit_transaction(CALL_SECONDS)


def measured(cluster: Cluster, kind: Kind, number: int, messages: int, seconds: float) -> dict[str, Any]:
    """The figures of one consumer, which handles so many messages or for so long."""
    spec = {
        "brokers": cluster.brokers, "topic": TOPIC, "group": f"bench-{number}", "mode": kind.mode,
        "is_async": kind.is_async, "batch": kind.batch, "messages": messages, "seconds": seconds,
    }  # fmt: skip
    return children.result(children.start("notify.bench.kafka.handled", spec), 2 * seconds + 120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--body", type=int, default=256, help="bytes")
    parser.add_argument("--seconds", type=float, default=20, help="the longest run of one consumer")
    parser.add_argument("--only", default="", help="kinds whose names begin so, beside the plain one")
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if kind is KINDS[0] or kind.name.startswith(given.only)]
    runs: dict[str, list[dict[str, Any]]] = {kind.name: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="notify-bench-") as directory, contextlib.ExitStack() as stack:
        nodes = KafkaCluster(Path(directory)).start()
        stack.callback(nodes.stop)
        cluster = Cluster.of(nodes.url)
        fill(cluster, given.messages, given.partitions, given.body)
        for number in range(given.rounds):
            for at, kind in enumerate(kinds[number % len(kinds) :] + kinds[: number % len(kinds)]):
                figures = measured(cluster, kind, number * len(kinds) + at, given.messages, given.seconds)
                runs[kind.name].append(figures)
                print(f"{kind.name:28} {figures['per_second']:9,.0f}/s {figures['cpu_us']:8.1f} µs of CPU", flush=True)
    print(f"\n{given.rounds} rounds, {given.messages:,} messages of {given.body} bytes, {given.partitions} partitions:")
    for name, figures_of_kind in runs.items():
        rates = [figures["per_second"] for figures in figures_of_kind]
        shares = [rate / of_plain["per_second"] for rate, of_plain in zip(rates, runs["plain"], strict=True)]
        cpu = statistics.median([figures["cpu_us"] for figures in figures_of_kind])
        print(
            f"{name:28} {statistics.median(rates):9,.0f}/s ({min(rates):,.0f} to {max(rates):,.0f}), "
            f"{statistics.median(shares):.3f} of plain, {cpu:.1f} µs of CPU each"
        )


if __name__ == "__main__":
    with exiting_when_told():
        main()
