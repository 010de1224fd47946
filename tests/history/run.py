"""`make crash-history SECONDS=600`: everything at once on PostgreSQL and MariaDB, under every fault.

The last line is the verdict; INCONCLUSIVE if a database cannot run here.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from notify.demo.kafka import KafkaCluster
from notify.errors import Unavailable
from notify.testing.mariadb_server import MariaDbServer
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.reachable import NotAvailable
from tests.history.checker import History, counts, violations
from tests.history.faults import Faults
from tests.history.room import small_disk
from tests.history.scene import Scene
from tests.history.stage import Stage

DISK_MEGABYTES = 1024
KAFKA_NODES = 3
SETTLE_SECONDS = 180.0
LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: its history, violations and faults."""

    history: History
    violations: list[str]
    faults: Counter[str]


def play(directory: Path, seconds: float, seed: int, scene: Scene) -> Outcome:
    """Play a history of so many seconds."""
    with ExitStack() as stack:
        room = stack.enter_context(small_disk(directory / "disk", DISK_MEGABYTES))
        stage = Stage(directory, room, scene)
        stage.start(stack)
        faults = Faults(stage, seed)
        faults.start()
        try:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                stage.hold_or_not()
                time.sleep(min(LOOK_SECONDS, left))  # the pause between two looks
        finally:
            faults.stop()
        unsettled = stage.settle(SETTLE_SECONDS)
        history = stage.history(unsettled)
    return Outcome(history, violations(history), faults.done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--over-databases", action="store_true", help="servers store their transactions in databases")
    parser.add_argument("--over-kafka", action="store_true", help="they do, and Kafka has the queues")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="notify-history-"))
    directory.chmod(0o755)  # PostgreSQL runs as another user where this one is root
    try:
        with ExitStack() as stack:
            servers: dict[str, Any] = {}
            for name, kind in (("pg", PostgreSqlServer), ("my", MariaDbServer)):
                place = directory / name
                place.mkdir()
                servers[name] = kind(place, durable=False).create()
                stack.callback(servers[name].stop)
            sources = {name: server.url for name, server in servers.items()}
            kafka = None
            if options.over_kafka:
                kafka = KafkaCluster(directory, nodes=KAFKA_NODES).start()
                stack.callback(kafka.stop)
            is_over_databases = options.over_databases or options.over_kafka
            scene = Scene(sources, servers, is_over_databases=is_over_databases, kafka=kafka)
            outcome = play(directory, options.seconds, seed, scene)
    except (NotAvailable, Unavailable) as reason:
        print(f"VERDICT: INCONCLUSIVE {reason}")
        return 2
    history = outcome.history
    told = Counter(history.answers.values())
    print(f"{len(history.committed):,} messages committed; callers were told {dict(told)}")
    print(f"{len(history.effects):,} effects in {len(history.expected)} groups")
    for name, count in sorted(outcome.faults.items()):
        print(f"  {count:5} {name}")
    for line in outcome.violations[:50]:
        print(line)
    summary = ", ".join(f"{kind} {count}" for kind, count in counts(outcome.violations).items())
    verdict = "FAIL" if outcome.violations else "PASS"
    if outcome.violations:
        print(f"what was left of it is in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"VERDICT: {verdict} {len(history.committed):,} messages, {sum(outcome.faults.values())} faults: {summary}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
