"""Kills nodes of a three-node Kafka behind a bridge, and checks what a reader of committed records receives.

Run as `python -m tests.crash.kafka --seconds 90`. Every acknowledged row of the source must be there once, no other.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from confluent_kafka import Consumer, KafkaError

from notify.bench.bridge import TOPIC, write
from notify.client.table import create_tables
from notify.demo.kafka import KafkaCluster
from notify.errors import Unavailable
from notify.kafka.records import ID, header, listed
from notify.testing.mariadb_server import MariaDbServer
from tests.support.commands import Command

NODES = 3


def committed(brokers: str, wanted: int, seconds: float) -> Counter[str]:
    """The number of records of each transaction."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"reader-{time.time_ns()}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([TOPIC])
    counts: Counter[str] = Counter()
    deadline, quiet = time.monotonic() + seconds, 0
    while time.monotonic() < deadline and quiet < 10:
        batch = consumer.consume(5000, 1.0)
        quiet = 0 if batch or len(counts) < wanted else quiet + 1
        for m in batch:
            error = m.error()
            if error is None:
                counts[(header(listed(m), ID) or "").partition(".")[0]] += 1
            elif error.code() != KafkaError._PARTITION_EOF and not error.retriable():
                raise RuntimeError(error)
    consumer.close()
    return counts


def run(directory: Path, stack: ExitStack, *, seconds: float, every: float, rate: float, seed: int) -> dict[str, Any]:
    """Run the campaign. Raises Unavailable or NotAvailable if a part cannot run."""
    chance = random.Random(seed)
    kafka = KafkaCluster(directory, nodes=NODES).start()
    stack.callback(kafka.stop)
    place = directory / "m"
    place.mkdir()
    source = MariaDbServer(place).create()
    stack.callback(source.stop)
    engine = sa.create_engine(source.url)
    create_tables(engine)
    engine.dispose()
    bridge = Command("bridge", "--dsn", f"k={source.url}", "--url", kafka.url).start()
    stack.callback(bridge.close)
    acknowledged: set[str] = set()
    writing = threading.Thread(
        target=lambda: acknowledged.update(write(sa.make_url(source.url), round(rate * seconds), 256, rate))
    )
    writing.start()
    kills = 0
    until = time.monotonic() + seconds
    while time.monotonic() + every < until:
        time.sleep(every * chance.uniform(0.7, 1.3))  # the campaign's pace
        node = chance.randrange(NODES)
        kafka.kill_node(node)
        kills += 1
        time.sleep(chance.uniform(1, 4))  # how long it is away
        kafka.start_node(node)
        if kills % 2:
            bridge.kill()
            bridge.start()
    writing.join()
    counts = committed(kafka.brokers, len(acknowledged), 120)
    return {
        "rows": len(acknowledged),
        "kills": kills,
        "lost": len(acknowledged - counts.keys()),
        "doubled": sum(1 for n in counts.values() if n > 1),
        "phantoms": len(counts.keys() - acknowledged),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-k-")))
        try:
            result = run(directory, stack, seconds=a.seconds, every=a.every, rate=a.rate, seed=a.seed)
        except Unavailable as reason:
            print(f"VERDICT: INCONCLUSIVE {reason}")
            return 2
    print(json.dumps(result))
    bad = [kind for kind in ("lost", "doubled", "phantoms") if result[kind]]
    print(f"VERDICT: {'FAIL ' + ', '.join(bad) if bad else 'PASS'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
