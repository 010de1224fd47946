"""A server's process: its port is taken, nobody reads its output, it is stopped for a while."""

from __future__ import annotations

import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from notify.errors import NotifyError
from notify.server import serve
from notify.server.settings import Settings
from notify.server.workers import supervisor
from notify.testing import forked, usage
from notify.testing.forked import launch
from notify.testing.ports import free_port
from notify.testing.process import ServerProcess
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin, is_ready
from tests.support.servers import stop_if_running


def start_beside_another(directory: Path, workers: int, told: Connection) -> None:
    """In a process of its own: start a server, on whose port another socket listens once the server has bound it."""
    bind = serve.listen

    def bind_beside_another(settings: Settings) -> socket.socket:
        own, other = bind(settings), socket.socket()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((settings.host, settings.port))
        other.listen()
        others.append(other)
        return own

    others: list[socket.socket] = []
    for module in (serve, supervisor):
        vars(module)["listen"] = bind_beside_another
    settings = Settings(port=free_port(), data_dir=str(directory), workers=workers)
    try:
        told.send((serve.serve if workers == 1 else supervisor.supervise)(settings))
    except NotifyError as error:
        told.send(f"{settings.port} {error}")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_is_taken_while_the_server_starts_is_said_in_a_sentence(tmp_path: Path, workers: int) -> None:
    """One server neither served nor ended; the parent of workers ended with a traceback."""
    hearing, telling = forked.context().Pipe(duplex=False)
    server = forked.context().Process(target=start_beside_another, args=(tmp_path / "data", workers, telling))
    server.start()
    try:
        assert hearing.poll(PATIENCE_SECONDS), "the server neither serves nor ends"
        port, _, said = str(hearing.recv()).partition(" ")
        assert said == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port"
        server.join(PATIENCE_SECONDS)
        assert server.exitcode == 0
    finally:
        server.kill()
        server.join()


# --- output that nobody reads: the process behind a pipe has ended, or journald was started again -----------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_goes_on_when_nobody_reads_its_output(tmp_path: Path, workers: int) -> None:
    """The parent of workers ended with the first worker that died; a change of a setting was answered with 500."""
    port = free_port()
    flags = ["--port", str(port), "--data-dir", str(tmp_path / "data"), "--workers", str(workers)]
    process = launch(["serve", *flags], os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        assert process.stdout is not None
        process.stdout.close()
        eventually(lambda: is_ready(url), "the server")
        admin(url, "PUT", "settings", {"values": {"retention_seconds": 100_000}})
        children = usage.children(process.pid) if workers > 1 else []
        for worker in children:
            os.kill(worker, signal.SIGKILL)
        eventually(lambda: not set(children) & set(usage.children(process.pid)) and is_ready(url), "other workers")
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait(60)


# --- stopped for a while, as by a debugger or a machine that sleeps -----------------------------------------------


STOPPED_SECONDS = 3.0
"""Longer than what a server takes for a busy machine."""


@pytest.mark.long
def test_leases_go_on_for_as_long_as_a_server_was_stopped(tmp_path: Path) -> None:
    """`notify serve` had the plain time of day, and not the clock that this is promised of: what was in hand had used
    up an attempt, and nothing looked whether the process was unreachable."""
    server = ServerProcess(tmp_path / "data").start()
    try:
        assert server.process is not None
        subscribe(server.url, "g", "t", max_attempts=1)
        publish(server.url, "t", ["a"])
        caller = Caller(server.url, "g", "i")
        messages = caller.receive("t", wait=30, lease=60)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)  # how long it is stopped
        os.kill(server.process.pid, signal.SIGCONT)
        eventually(
            lambda: any("was_away" in line for line in server.output), "the server to see that it was unreachable"
        )
        assert caller.settle(messages) == [200]
    finally:
        stop_if_running(server)
