"""Workers that hang: they are left alone, killed after `worker_timeout_seconds`, and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from notify.client import Message, TransactionProducer
from notify.server.workers.parent import STACK
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import admin, ask, metric, refusal
from tests.support.servers import process_of, stop_if_running

KEYS = list(map(str, range(20)))


@contextmanager
def serving(directory: Path, timeout_seconds: float) -> Iterator[ServerProcess]:
    """Two workers, of which each is killed after so long without a sign of life."""
    environment = {"NOTIFY_WORKER_TIMEOUT_SECONDS": str(timeout_seconds)}
    server = ServerProcess(directory, environment=environment, flags=["--workers", "2"]).start()
    try:
        yield server
    finally:
        stop_if_running(server)


def publish(url: str, keys: list[str]) -> None:
    with TransactionProducer(url, group="orders") as producer:
        for key in keys:
            producer.publish(Message("kept", b"", key=key))


@pytest.mark.long
def test_a_worker_that_hangs_is_killed_and_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    with serving(tmp_path / "data", 5) as server:
        publish(server.url, KEYS)
        hanging = process_of(server, "worker-1")
        os.kill(hanging, signal.SIGSTOP)
        eventually(lambda: hanging not in server.workers(), "its end")
        # Another worker takes what names none, and waits for the new one.
        eventually(lambda: ask(server.url, "GET", "/readyz")[0] == 200, "the worker that was started again")
        publish(server.url, KEYS)
        assert sum(queue["end"] for queue in admin(server.url, "GET", "topics/kept")["queues"]) == 2 * len(KEYS)
        assert metric(server.url, 'notify_worker_restarts_total{worker="worker-1",why="hung"}') >= 1
        (alarm,) = eventually(
            lambda: [a for a in admin(server.url, "GET", "overview")["alarms"] if a["target"] == "worker-1"], "an alarm"
        )
        assert alarm["name"] == "worker" and "it hung" in alarm["text"], alarm
        assert any("worker_hangs" in line and "worker-1" in line for line in server.output)


def test_a_worker_writes_where_it_stands_when_it_is_told_to(tmp_path: Path) -> None:
    """Its parent tells it so before it kills it; a worker that is told so by mistake continues."""
    with serving(tmp_path / "data", 3600) as server:
        told = process_of(server, "worker-2")
        os.kill(told, STACK)
        eventually(lambda: any("most recent call first" in line for line in server.output), "its stack")
        assert ask(server.url, "GET", "/worker-2/readyz")[0] == 200 and told in server.workers()


@pytest.mark.long
def test_a_worker_that_hangs_is_asked_nothing_until_it_gives_a_sign_of_life(tmp_path: Path) -> None:
    """The others say that it does not answer, and take what is for any worker."""
    with serving(tmp_path / "data", 3600) as server, ExitStack() as stack:
        hanging = process_of(server, "worker-1")
        os.kill(hanging, signal.SIGSTOP)
        stack.callback(os.kill, hanging, signal.SIGCONT)
        eventually(lambda: any("worker_is_silent" in line for line in server.output), "its parent to notice")
        status, answer = eventually(
            lambda: probe if (probe := ask(server.url, "GET", "/readyz"))[0] == 503 else None, "the other to hear of it"
        )
        assert (status, answer["waits_for"]) == (503, "worker-1")
        assert admin(server.url, "GET", "overview")["missing"] == ["worker-1"]
        status, problem = ask(server.url, "PUT", "/v1/admin/topics/made", {"reason": "a test"})
        assert status == 503 and problem["detail"].startswith("worker-1 does not answer"), problem
        (item,) = ask(server.url, "POST", "/v1/messages", {"messages": [{"topic": "kept", "body": ""}]})[1]["items"]
        assert (item["status"], item["shard"]) == (201, "worker-2")
        os.kill(hanging, signal.SIGCONT)
        eventually(lambda: ask(server.url, "GET", "/readyz")[0] == 200, "a sign of life")
        assert hanging in server.workers()
        assert refusal(server.url, "GET", "topics/made") == (404, "not_found")


START = """
import os, socket, sys, time
from notify.errors import StorageFailed
from notify.server.workers.parent import Parent
from notify.server.settings import Settings

settings = Settings(workers=2, worker_timeout_seconds=1)
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
parent = Parent(settings, "", sockets, None)
try:
    parent.run()
except StorageFailed as error:
    sys.exit(str(error))
if parent.child.worker.number == 1:
    os.read(parent.child.hear, 1)  # until the parent ends
if sys.argv[1] == "computes":
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        pass
    os._exit(3)
os.read(os.pipe()[0], 1)
"""
"""Starts two workers that are never ready: the first one as it is told, while the second one waits for its parent."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("stands still", "worker-[12] cannot start: it hung while it started: .* no sign of life for 1 s"),
        ("computes", "worker-2 cannot start: it hung while it started"),
    ],
)
def test_a_worker_that_stands_still_while_it_starts_is_killed(does: str, said: str) -> None:
    """It was waited for without a bound. One that computes is left alone: its recovery takes long."""
    started = subprocess.run(
        [sys.executable, "-c", START, does], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert started.returncode == 1 and re.search(said, started.stderr), started
