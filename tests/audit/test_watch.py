"""A watch beside a running shop: what is lost comes out in time, and kills and stalls lose and double nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from notify import ids
from notify.bench.server import ServerProcess
from notify.client import Consumer, Inbox, Message, TransactionProducer, create_tables
from notify.client.table import half_message
from notify.errors import NotifyError
from tests.conftest import empty_database, make_engine
from tests.integration.shop import Base, Order

WINDOW = 6.0
TOPIC = "order.placed"


class Busy:
    """Orders all the time, consumed all the time, until it is left."""

    def __init__(self, url: str, server: ServerProcess) -> None:
        self.engine = make_engine(url)
        create_tables(self.engine)
        Base.metadata.create_all(self.engine)
        self.producer = TransactionProducer(server.url, group="orders", engine=self.engine)
        self.consumer = Consumer(server.url, group="points", inbox=Inbox(self.engine))
        self.consumer.subscribe(TOPIC, start="earliest")(lambda message, session: None)
        self.stop = threading.Event()
        self.placed = 0
        self._threads = [
            threading.Thread(target=self._order),
            threading.Thread(target=self.consumer.run, kwargs={"signals": False}),
        ]

    def _order(self) -> None:
        while not self.stop.wait(0.02):
            try:
                with Session(self.engine) as session, session.begin():
                    session.add(Order(item="tea"))
                    self.producer.send(session, Message(TOPIC, {"n": self.placed}, key=str(self.placed % 7)))
                self.placed += 1
            except NotifyError:
                pass  # the server is away: this order did not happen

    def lose(self) -> str:
        """A transaction that committed, and whose message nobody has."""
        name = ids.to_text(ids.new_id())
        row = {
            "transaction_id": name, "message_no": 0, "producer_group": "orders", "mode": "half", "state": "COMMITTED",
            "shards": "", "topic": TOPIC, "relayed": 1, "created_at": sa.text("clock_timestamp() AT TIME ZONE 'utc'"),
        }  # fmt: skip
        with self.engine.begin() as connection:
            connection.execute(half_message.insert().values(**row))
        return f"{name}.0"

    @contextmanager
    def running(self) -> Iterator[Busy]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            self.consumer.stop()
            for thread in self._threads:
                thread.join(20)
            self.producer.close()
            self.engine.dispose()


class Watching:
    """`notify audit watch` as a process; its lines as they come."""

    def __init__(self, url: str, server: ServerProcess, state: Path, *flags: str) -> None:
        self._command = [
            sys.executable, "-m", "notify.cli.main", "audit", "watch", "--json", "--database", f"shop={url}",
            "--log", str(server.data_dir), "--window-seconds", str(WINDOW), "--max-transaction-seconds", "2",
            "--deliver-seconds", "2", "--state", str(state), "--memory", "1g", *flags,
        ]  # fmt: skip
        self.state = state
        self.lines: list[tuple[float, dict[str, Any]]] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Watching:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.time(), json.loads(line)))

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)  # its JVM too
        else:
            self.process.send_signal(number)
        code = self.process.wait(60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def of(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [line for line in self.lines if line[1]["kind"] == kind]

    def wait_for(self, what: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process is not None and self.process.poll() is None, self.process.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline, self.lines[-5:]
            time.sleep(0.1)


def test_a_watch_finds_what_is_lost_beside_load_through_kills_and_stalls(
    database_urls: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("pyspark")
    server = ServerProcess(tmp_path / "data").start()
    with empty_database("postgresql", database_urls, tmp_path) as url:
        watching = Watching(url, server, tmp_path / "state")
        try:
            with Busy(url, server).running() as busy:
                _watch(busy, watching, server)
        finally:
            if watching.process is not None and watching.process.poll() is None:
                watching.kill()
            server.stop()


def _watch(busy: Busy, watching: Watching, server: ServerProcess) -> None:
    watching.start()
    watching.wait_for(lambda: watching.of("window"), 90)
    lost = [busy.lose()]
    planted = time.time()
    watching.wait_for(lambda: watching.of("finding"), 4 * WINDOW)
    at, line = watching.of("finding")[0]
    assert (line["finding"], line["message_id"]) == ("LOST", lost[0])
    assert at - planted < 3 * WINDOW  # the window it lies in, and at most two more

    # Killed at any moment, it goes on where it was.
    lost.append(busy.lose())
    time.sleep(WINDOW / 2)
    watching.kill()
    watching.start()
    watching.wait_for(lambda: len(watching.of("finding")) >= 2, 12 * WINDOW)

    # The server stalls; what is lost meanwhile comes out all the same.
    server.kill()
    lost.append(busy.lose())
    watching.wait_for(lambda: len(watching.of("finding")) >= 3, 8 * WINDOW)
    server.start()
    lines = [json.loads(line) for line in (watching.state / "findings.jsonl").read_text().splitlines()]
    said = Counter(line["message_id"] for line in lines if line["kind"] == "finding" and line["finding"] == "LOST")
    assert said == Counter(lost)
    # While the server was away, groups could settle nothing; nothing else may be said.
    assert {line["finding"] for line in lines if line["kind"] == "finding"} <= {"LOST", "UNDELIVERED"}
    assert watching.kill(signal.SIGTERM) == 0
    windows = [line["window_us"] for _, line in watching.of("window")]
    # Each window once but for those that a kill cut short, and none left out.
    assert sorted(set(windows)) == list(range(windows[0], windows[-1] + 1, round(WINDOW * 1e6)))
    assert busy.placed > 300
