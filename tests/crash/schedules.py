"""Schedules on three servers over one database, which are killed one after the other: each instant is sent once.

Run as `python -m tests.crash.schedules --database postgresql --kills 30`. Half of the servers' lives are armed to die
between the message of an instant and the mark that it is done. Meanwhile schedules get other messages, and are paused
and resumed. At the end the messages in the database are compared with the instants: none is missing between the first
and the last one of a schedule, except in its pauses, and none is there twice, nor in the counts of the servers.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from notify.client import Message, TransactionProducer
from notify.errors import NotifyError
from notify.storage.sql.engines import opened
from notify.storage.sql.tables import server_half_message as half
from notify.testing import forked
from notify.testing.databases import BINLOG_SERVERS
from notify.testing.postgresql_server import PostgreSqlServer
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import admin
from tests.support.servers import make_storage, stop_if_running
from tests.support.verdict import command_line, concluded, judged

KINDS = {"postgresql": PostgreSqlServer, **BINLOG_SERVERS}
SERVERS = 3
TOPIC = "instants"
SECOND = timedelta(seconds=1)


@dataclass
class Books:
    """The changes that were made to schedules."""

    resumed: dict[str, list[datetime]] = field(default_factory=lambda: defaultdict(list))
    """By schedule: when it was resumed after a pause; the instants just before are left out on purpose."""
    changed: int = 0
    killed: int = 0
    died: int = 0


def stored(storage: str) -> dict[str, list[datetime]]:
    """The instants of the messages of each schedule, in order, as they are in the database."""
    found: dict[str, list[datetime]] = defaultdict(list)
    with opened(storage) as engine, engine.connect() as connection:
        for (headers,) in connection.execute(sa.select(half.c.headers)):
            fields = json.loads(headers)
            found[fields["notify-schedule"]].append(datetime.fromisoformat(fields["notify-scheduled-for"]))
    return {name: sorted(instants) for name, instants in found.items()}


def wrong(instants: dict[str, list[datetime]], resumed: dict[str, list[datetime]]) -> dict[str, int]:
    """How many instants are lost and doubled. A gap is right if a pause ended in it."""
    lost = doubled = 0
    for name, found in instants.items():
        for earlier, later in zip(found, found[1:], strict=False):
            if earlier == later:
                doubled += 1
            elif not any(earlier < at <= later + SECOND for at in resumed.get(name, ())):
                lost += (later - earlier) // SECOND - 1
    return {"lost": lost, "doubled": doubled}


class Cluster:
    """Servers over a database, some of which die between a message and its mark."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack, chance: random.Random) -> None:
        make_storage(storage)
        self.storage, self._directory, self._stack, self._chance = storage, directory, stack, chance
        self.servers = [self._started(n) for n in range(SERVERS)]

    def _started(self, number: int) -> ServerProcess:
        armed = {"NOTIFY_CRASH_AT": f"schedule.before_mark:{self._chance.randint(2, 12)}"}
        server = ServerProcess(
            self._directory / f"s{number}",
            environment=armed if self._chance.random() < 0.5 else None,
            flags=["--storage", self.storage],
        )
        self._stack.callback(stop_if_running, server)
        return server.start()

    def replace(self, number: int) -> bool:
        """Kill a server and start another one in its place; whether it had died by itself."""
        server = self.servers[number]
        assert server.process is not None
        had_died = server.process.poll() is not None
        if not had_died:
            server.kill()
        self.servers[number] = self._started(number)
        return had_died

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    def listed(self) -> list[dict[str, Any]]:
        """The schedules, as a server that answers lists them."""

        def tried() -> list[dict[str, Any]]:
            for server in self.servers:
                try:
                    rows: list[dict[str, Any]] = admin(server.url, "GET", "schedules?max=10000")["schedules"]
                except (OSError, AssertionError):
                    continue
                return rows
            return []

        return eventually(tried, "a server that answers")


def trouble(cluster: Cluster, names: list[str], kills: int, pause: float, books: Books, chance: random.Random) -> None:
    """Kill servers, and change, pause and resume schedules."""
    for number in range(kills):
        time.sleep(chance.uniform(0.3, 1.7) * pause)  # the campaign's pace
        books.died += cluster.replace(number % SERVERS)
        books.killed += 1
        name = chance.choice(names)
        try:
            with TransactionProducer(cluster.url, group="c", answer_checks=False) as producer:
                producer.schedule(name, Message(TOPIC, f"{name} {number}"), every=1, catch_up="all", catch_up_most=1000)
            books.changed += 1
        except NotifyError:
            continue  # a server that died by itself was asked last: nothing may have changed
        if number % 4 == 0:
            url = cluster.servers[number % SERVERS].url
            try:
                admin(url, "POST", f"schedules/{name}/pause", {})
                admin(url, "POST", f"schedules/{name}/resume", {})
            except (OSError, AssertionError):
                for row in cluster.listed():  # the server died in between
                    if row["state"] == "paused":
                        eventually(lambda paused=row["name"]: _resumed(cluster, paused), "a resume")  # type: ignore[misc]
            books.resumed[name].append(datetime.now().astimezone())


def _resumed(cluster: Cluster, name: str) -> bool:
    for server in cluster.servers:
        try:
            admin(server.url, "POST", f"schedules/{name}/resume", {})
        except (OSError, AssertionError):
            continue
        return True
    return False


def run(storage: str, directory: Path, schedules: int, kills: int, pause: float, seed: int) -> dict[str, Any]:
    """Run the campaign; what was found."""
    chance, books = random.Random(seed), Books()
    names = [f"schedule-{n}" for n in range(schedules)]
    with ExitStack() as stack:
        cluster = Cluster(storage, directory, stack, chance)
        for name in names:
            eventually(lambda name=name: _declared(cluster, name), f"{name} to be declared")  # type: ignore[misc]
        trouble(cluster, names, kills, pause, books, chance)
        last = datetime.now().astimezone()

        def all_sent() -> bool:
            found = stored(storage)
            return len(found) == schedules and all(instants[-1] > last for instants in found.values())

        eventually(all_sent, "an instant of each schedule after the last kill")
        for server in cluster.servers:
            server.stop()
        counted = sum(row["sent"] for row in _rows(storage))
        found = stored(storage)
    sent = sum(map(len, found.values()))
    report = {"schedules": schedules, "messages": sent, "counted": counted} | wrong(found, books.resumed)
    return report | {"kills": books.killed, "died_before_a_mark": books.died, "changes": books.changed}


def _declared(cluster: Cluster, name: str) -> bool:
    try:
        with TransactionProducer(cluster.url, group="c", answer_checks=False) as producer:
            producer.schedule(name, Message(TOPIC, name), every=1, catch_up="all", catch_up_most=1000)
    except NotifyError:
        return False  # a server that dies by itself
    return True


def _rows(storage: str) -> list[dict[str, Any]]:
    from notify.server.schedules.records import ScheduleRecords

    with opened(storage) as engine:
        return ScheduleRecords(engine).all()


def broken(report: dict[str, Any]) -> list[str]:
    """The broken promises of a run."""
    bad = [f"{kind} {report[kind]}" for kind in ("lost", "doubled") if report[kind]]
    # A server that dies before a mark leaves the count to the one that finds the message there.
    if report["counted"] > report["messages"]:
        bad.append(f"{report['counted']} are counted, and {report['messages']} are there")
    return bad


def main() -> int:
    a = command_line(__doc__, database=tuple(KINDS), schedules=50, kills=60, pause=2.0, seed=1)
    ServerProcess.launch = staticmethod(forked.launch)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-d-")))
        database = KINDS[a.database](place).create()
        stack.callback(database.stop)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-schedules-")))
        report = run(database.url, directory, a.schedules, a.kills, a.pause, a.seed)
    return concluded(broken(report), json.dumps(report))


if __name__ == "__main__":
    sys.exit(judged(main))
