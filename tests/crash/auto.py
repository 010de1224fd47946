"""Mode auto under load, with a server that is killed again and again: `python -m tests.crash.auto --seconds 600`.

A process whose threads have a key each commits all the time, and the server is killed every few seconds and stays
unreachable for a while; with `--outage` once, in the middle, for longer. At the end every commit has succeeded, 99 of
100 within `half_timeout`, and each key's messages are in the queue once each, in the order of their commits.

With `--mover` a relay or bridge of the database runs, too, and is killed as well. Further processes, each with a
producer group of its own, are killed for good once each of their keys has left something behind: only the mover can
send that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client import Message, TransactionProducer, create_tables
from notify.client.tables.definitions import half_message, is_left_behind
from notify.testing import forked
from notify.testing.ports import free_port
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from tests.crash.bridge import WAL
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.commands import Command
from tests.support.databases import DATABASES, Urls, drop_slots, empty_database
from tests.support.http import ask
from tests.support.shop import make_engine
from tests.support.verdict import judged

TOPIC = "auto"
MOVERS = ("relay", "bridge")
PRODUCERS = 2
"""How many producers a process has."""
LASTING_THREADS, DOOMED_THREADS = 8, 4
"""How many threads commit in the process that lasts, and in one that will be killed."""
SQLITE_THREADS = 2
"""How many do on SQLite, whose waiting writers retry at intervals that grow to 0.1 s: with eight threads and no message
one commit in a hundred takes 0.4 s."""
PAUSE_SECONDS = 0.005
"""The pause of a thread between two commits, so that a machine with few cores measures the commits."""
DRAIN_SECONDS = 300.0


class Load:
    """A process of a producer group whose threads, with a key each, commit until it is stopped or killed.

    It writes a line for each commit, once that has succeeded.
    """

    def __init__(self, group: str, threads: int, url: str, dsn: str, directory: Path, half_timeout: float) -> None:
        self.group = group
        self.keys = [f"{group}.{number}" for number in range(threads)]
        self._lines = directory / f"{group}.lines"
        self._stopping, theirs = forked.context().Pipe()
        arguments = (group, self.keys, url, dsn, self._lines, half_timeout, theirs)
        self._process = forked.context().Process(target=_commit, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def lines(self) -> Iterator[list[Any]]:
        """`[key, number, seconds]` of each commit, and `[error]` of each that failed."""
        if self._lines.exists():
            yield from map(json.loads, self._lines.read_text().splitlines())

    def stop(self) -> list[str]:
        """Let it end once the server has everything; the ids of the transactions that the server does not get."""
        self._stopping.send(None)
        assert self._stopping.poll(DRAIN_SECONDS + PATIENCE_SECONDS), f"group {self.group} does not stop"
        left: list[str] = self._stopping.recv()
        self._process.join(PATIENCE_SECONDS)
        return left

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_SECONDS)
        assert self._process.exitcode == -signal.SIGKILL, f"group {self.group} ended by itself"


def _commit(group: str, keys: list[str], url: str, dsn: str, lines: Path, half_timeout: float, stopping: Any) -> None:
    """The process of a Load."""
    engine = make_engine(dsn)
    output = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    is_over = threading.Event()

    def work(producer: TransactionProducer, key: str) -> None:
        number = 0
        while not is_over.wait(PAUSE_SECONDS):
            began = time.monotonic()
            line: list[Any]
            try:
                with engine.connect() as connection, producer.transaction(connection) as tx:
                    tx.send(Message(TOPIC, str(number), key=key))
                line = [key, number, time.monotonic() - began]
                number += 1
            except Exception as error:
                line = [f"{type(error).__name__}: {error}"]
            os.write(output, json.dumps(line).encode() + b"\n")

    with ExitStack() as stack:
        options: Any = {"group": group, "engine": engine, "mode": "auto", "half_timeout": half_timeout}
        producers = [stack.enter_context(TransactionProducer(url, **options)) for _ in range(PRODUCERS)]
        threads = [
            threading.Thread(target=work, args=(producers[number % PRODUCERS], key), daemon=True)
            for number, key in enumerate(keys)
        ]
        for thread in threads:
            thread.start()
        stopping.recv()
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        stopping.send([name for producer in producers for name in producer.flush(DRAIN_SECONDS)])


@contextmanager
def source(database: str, mover: str, directory: Path) -> Iterator[str]:
    """The URL of an empty database, which the mover can read."""
    with ExitStack() as stack:
        urls = Urls(stack)
        is_wal = (database, mover) == ("postgresql", "bridge")
        if is_wal:
            directory.chmod(0o755)  # root runs PostgreSQL as another user, who has to reach its directory
            place = directory / "postgresql"
            place.mkdir()
            postgresql = PostgreSqlServer(place, durable=False, settings=WAL).create()
            stack.callback(postgresql.kill)
            urls["postgresql"] = postgresql.url
        url = stack.enter_context(empty_database(database, urls, directory))
        if is_wal:
            stack.callback(drop_slots, url)
        yield url


def left_behind(engine: sa.Engine, group: str | None = None) -> set[str]:
    """The keys of all that waits, or of what one group has left behind."""
    query = sa.select(half_message.c.key).where(is_left_behind).distinct()
    if group is not None:
        query = query.where(half_message.c.producer_group == group)
    with engine.connect() as connection:
        return set(connection.scalars(query))


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


def disordered(numbers: list[int]) -> list[int]:
    """Where, among the first copies of a key's messages, one comes after a later one."""
    first = list(dict.fromkeys(numbers))
    return [place for place in range(1, len(first)) if first[place] < first[place - 1]]


def judge(commits: dict[str, int], found: dict[str, list[int]]) -> tuple[int, int, int]:
    """How many messages are lost, doubled, and out of order. `commits`: the number of commits with each key."""
    lost = doubled = disorder = 0
    for key, count in commits.items():
        numbers = found.get(key, [])
        doubled += sum(times - 1 for times in Counter(numbers).values())
        lost += len(set(range(count)) - set(numbers))
        disorder += len(disordered(numbers))
    return lost, doubled, disorder


def explain_disorder(engine: sa.Engine, found: dict[str, list[int]]) -> None:
    """Print what the database has of messages around those that came out of order."""
    columns = half_message.c
    query = sa.select(columns.body, columns.transaction_id, columns.created_at, columns.relayed, columns.shards)
    for key, numbers in found.items():
        first = list(dict.fromkeys(numbers))
        for place in disordered(numbers):
            around = first[max(0, place - 3) : place + 3]
            print(f"key {key}: {around} in the queue; their rows:")
            with engine.connect() as connection:
                bodies = [str(number).encode() for number in around]
                for row in connection.execute(query.where(columns.key == key, columns.body.in_(bodies))):
                    print(f"  {tuple(row)}")


class Scene:
    """The server, the load that lasts and, with a mover, the loads that are killed."""

    def __init__(self, database: str, mover: str, half_timeout: float, directory: Path, stack: ExitStack) -> None:
        self._directory, self._half_timeout = directory, half_timeout
        self._dsn = stack.enter_context(source(database, mover, directory))
        self.engine = make_engine(self._dsn)
        stack.callback(self.engine.dispose)
        create_tables(self.engine)
        self.server = ServerProcess(directory / "data", free_port()).start()
        stack.callback(self.server.stop)
        self._most_threads = SQLITE_THREADS if database == "sqlite" else max(LASTING_THREADS, DOOMED_THREADS)
        self.loads = [self._load("lasts", LASTING_THREADS)]
        self.mover: Command | None = None
        if mover:
            self.mover = Command(mover, "--url", self.server.url, "--dsn", self._dsn).start()
            stack.callback(self.mover.close)
            self.doom()

    def _load(self, group: str, threads: int) -> Load:
        threads = min(threads, self._most_threads)
        return Load(group, threads, self.server.url, self._dsn, self._directory, self._half_timeout)

    def doom(self) -> None:
        """Start a load that will be killed. The server is there: the first commits of a process would wait for it."""
        self.loads.append(self._load(f"killed{len(self.loads)}", DOOMED_THREADS))

    def kill_the_doomed(self) -> None:
        """While the server is unreachable, let the youngest load leave something behind with each key, and kill it."""
        doomed = self.loads[-1]
        eventually(
            lambda: left_behind(self.engine, doomed.group).issuperset(doomed.keys), f"group {doomed.group} to commit"
        )
        doomed.kill()

    def commits(self) -> list[list[Any]]:
        return [line for load in self.loads for line in load.lines()]


def run(
    database: str,
    seconds: float,
    every: float,
    away: float,
    half_timeout: float,
    seed: int,
    *,
    mover: str = "",
    outage: float = 0.0,
) -> int:
    """Print the verdict; the exit code. `every`, `away`: seconds between two kills, and how long the server is
    unreachable; `outage`: how long it is unreachable once, beside `seconds`; `mover`: one of MOVERS, or none."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-auto-")))
        scene = Scene(database, mover, half_timeout, directory, stack)
        began, kills = time.monotonic(), 0
        until, outage_at = began + seconds + outage, began + seconds / 2
        while time.monotonic() < until:
            time.sleep(every * (0.5 + chance.random()))  # the time between two kills
            scene.server.kill()
            kills += 1
            if scene.mover is not None:
                scene.kill_the_doomed()
                if chance.random() < 0.5:
                    scene.mover.kill()
                    scene.mover.start()
            if outage and time.monotonic() > outage_at:
                time.sleep(outage)  # the time that the server is unreachable
                outage = 0.0
            else:
                time.sleep(away * chance.random())  # the time that the server is unreachable
            scene.server.start()
            if scene.mover is not None:
                scene.doom()
        left = [name for load in scene.loads if load.group == "lasts" for name in load.stop()]
        if scene.mover is not None:
            left += scene.loads[-1].stop()
            # The killed have left it, and the mover looks every ten seconds.
            eventually(lambda: not left_behind(scene.engine), "the mover to send what was left behind", DRAIN_SECONDS)
        lines = scene.commits()
        commits = [line for line in lines if len(line) > 1]
        found = delivered(scene.server.url)
        lost, doubled, disorder = judge(Counter(key for key, *_ in commits), found)
        explain_disorder(scene.engine, found)
    failures = Counter(line[0] for line in lines if len(line) == 1)
    for text, count in failures.most_common(5):
        print(f"{count} times: {text}")
    took = sorted(line[2] for line in commits)
    p99, most = took[int(0.99 * (len(took) - 1))], took[-1]
    failed = sum(failures.values())
    is_good = not (failed or left or lost or doubled or disorder) and p99 <= half_timeout and kills > 0
    killed = f" by a {mover}, {len(scene.loads) - 2} producers killed" if mover else ""
    print(
        f"VERDICT: {'PASS' if is_good else 'FAIL'} {database}{killed}: {len(commits)} commits, {kills} kills, "
        f"failed {failed}, left {len(left)}, lost {lost}, doubled {doubled}, disorder {disorder}, p99 {p99:.3f} s, "
        f"longest {most:.3f} s"
    )
    return 0 if is_good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills, on average")
    parser.add_argument("--away", type=float, default=2.0, help="the most seconds that the server is unreachable")
    parser.add_argument("--outage", type=float, default=0.0, help="seconds that it is unreachable once, in the middle")
    parser.add_argument("--mover", choices=MOVERS, default="", help="who sends what killed producers left behind")
    parser.add_argument("--half-timeout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if (given.database, given.mover) == ("sqlite", "bridge"):
        parser.error("SQLite has no log that a bridge could read: --mover relay")
    ServerProcess.launch = staticmethod(forked.launch)
    return judged(
        lambda: run(
            given.database,
            given.seconds,
            given.every,
            given.away,
            given.half_timeout,
            given.seed,
            mover=given.mover,
            outage=given.outage,
        ),
        most_seconds=2 * (given.seconds + given.outage) + 2 * DRAIN_SECONDS + 120,
    )


if __name__ == "__main__":
    sys.exit(main())
