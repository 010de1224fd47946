"""Mode auto under load, with a server that is killed again and again: `python -m tests.crash.auto --seconds 600`.

Threads of two producers of one group commit all the time, each with a key of its own. The server is killed every few
seconds, and stays away for a while. At the end every commit has succeeded, 99 of 100 within `half_timeout`, and each
key's messages are in the queue once each, in the order of their commits.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy as sa

from notify.client import Message, TransactionProducer, create_tables
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS
from tests.support.databases import DATABASES, Urls, empty_database
from tests.support.http import ask
from tests.support.shop import make_engine
from tests.support.verdict import judged

TOPIC = "auto"
THREADS = 4
"""Threads of each producer."""
PAUSE_SECONDS = 0.005
"""The pause of a thread between two commits, so that a machine with few cores measures the commits."""
DRAIN_SECONDS = 300.0


class Key:
    """A thread's key, and how many transactions with it have committed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commits = 0


class Load:
    """Threads that commit until they are stopped."""

    def __init__(self, engine: sa.Engine, producers: list[TransactionProducer], keys: list[Key]) -> None:
        """`keys`: one for each thread."""
        self._engine = engine
        self._stopping = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._work, args=(producers[n // THREADS], key), daemon=True)
            for n, key in enumerate(keys)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, producer: TransactionProducer, key: Key) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            began = time.monotonic()
            try:
                with self._engine.connect() as connection, producer.transaction(connection) as tx:
                    tx.send(Message(TOPIC, str(key.commits), key=key.name))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.seconds.append(time.monotonic() - began)
            key.commits += 1

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)


def delivered(url: str) -> dict[str, list[int]]:
    """The numbers of the messages of each key, in the order of the queues."""
    found: dict[str, list[int]] = {}
    for queue in range(64):
        offset = 0
        while True:
            path = f"/v1/topics/{TOPIC}/queues/{queue}/messages?offset={offset}&max=1000"
            status, answer = ask(url, "GET", path)
            if status != 200:
                return found
            for message in answer["messages"]:
                found.setdefault(message["key"], []).append(int(message["body"]))
            if not answer["messages"]:
                break
            offset = answer["next_offset"]
    return found


def judge(keys: list[Key], found: dict[str, list[int]]) -> tuple[int, int, int]:
    """How many messages are lost, doubled, and out of order."""
    lost = doubled = disorder = 0
    for key in keys:
        numbers = found.get(key.name, [])
        doubled += sum(count - 1 for count in Counter(numbers).values())
        lost += len(set(range(key.commits)) - set(numbers))
        first = list(dict.fromkeys(numbers))
        disorder += sum(later < earlier for earlier, later in zip(first, first[1:], strict=False))
    return lost, doubled, disorder


def run(database: str, seconds: float, every: float, away: float, half_timeout: float, seed: int) -> int:
    """Print the verdict; the exit code. `every`, `away`: seconds between two kills, and how long the server is away."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-auto-")))
        url = stack.enter_context(empty_database(database, Urls(stack), directory))
        engine = make_engine(url)
        stack.callback(engine.dispose)
        create_tables(engine)
        server = ServerProcess(directory / "data", free_port()).start()
        stack.callback(server.stop)
        keys = [Key(f"k{n}") for n in range(2 * THREADS)]
        producers = [
            stack.enter_context(
                TransactionProducer(server.url, group="auto", engine=engine, mode="auto", half_timeout=half_timeout)
            )
            for _ in range(2)
        ]
        load = Load(engine, producers, keys)
        until, kills = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            time.sleep(every * (0.5 + chance.random()))  # the time between two kills
            server.kill()
            kills += 1
            time.sleep(away * chance.random())  # the time that the server is away
            server.start()
        load.stop()
        left = [name for producer in producers for name in producer.flush(DRAIN_SECONDS)]
        lost, doubled, disorder = judge(keys, delivered(server.url))
    commits = sorted(load.seconds)
    p99, most = commits[int(0.99 * (len(commits) - 1))], commits[-1]
    failed = len(load.failures)
    for text, count in Counter(load.failures).most_common(5):
        print(f"{count} times: {text}")
    is_good = not (failed or left or lost or doubled or disorder) and p99 <= half_timeout and kills > 0
    print(
        f"VERDICT: {'PASS' if is_good else 'FAIL'} {database}: {len(commits)} commits, {kills} kills, failed {failed}, "
        f"left {len(left)}, lost {lost}, doubled {doubled}, disorder {disorder}, p99 {p99:.3f} s, longest {most:.3f} s"
    )
    return 0 if is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills, on average")
    parser.add_argument("--away", type=float, default=2.0, help="the most seconds that the server is away")
    parser.add_argument("--half-timeout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    return judged(
        lambda: run(given.database, given.seconds, given.every, given.away, given.half_timeout, given.seed),
        most_seconds=2 * given.seconds + DRAIN_SECONDS + 120,
    )


if __name__ == "__main__":
    sys.exit(main())
