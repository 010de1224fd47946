"""A supervisor is told when a process is ready, makes progress, and stops: by systemd's socket, or a file."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notify.runtime import alive
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.http import ask


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager, which the environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "manager"))
        listening.settimeout(PATIENCE_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        yield listening


def told_until(manager: socket.socket, state: str) -> list[str]:
    """The states that the manager is told, up to one."""
    told = [manager.recv(4096).decode()]
    while told[-1] != state:
        told.append(manager.recv(4096).decode())
    return told


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_is_ready_when_it_listens(manager: socket.socket, tmp_path: Path, workers: int) -> None:
    """`listening` was logged up to 1.3 s before the socket listened, and off a terminal nothing said "ready"."""
    port = free_port()
    words = ["serve", "--port", str(port), "--data-dir", str(tmp_path / "data"), "--workers", str(workers)]
    server = subprocess.Popen(
        [sys.executable, "-m", "notify", *words],
        env=os.environ | {"WATCHDOG_USEC": "400000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert told_until(manager, "READY=1") == ["READY=1"]
        assert ask(f"http://127.0.0.1:{port}", "GET", "/readyz")[0] == 200
        assert set(told_until(manager, "WATCHDOG=1")) == {"WATCHDOG=1"}
        server.send_signal(signal.SIGTERM)
        assert set(told_until(manager, "STOPPING=1")) <= {"WATCHDOG=1", "STOPPING=1"}
    finally:
        server.kill()
        output = server.communicate()[0]
    lines = output.splitlines()
    assert [line for line in lines if " ready " in line and f":{port}" in line], output
    assert not [line for line in lines if " listening " in line], output


@pytest.mark.long
def test_a_mover_touches_its_file_while_it_waits_for_its_database(tmp_path: Path) -> None:
    """A probe restarts a mover that hangs, not one whose target is unreachable."""
    file = tmp_path / "alive"
    mover = subprocess.Popen(
        [sys.executable, "-m", "notify", "relay", "--dsn", "postgresql+psycopg://127.0.0.1:9/x"],
        env=os.environ | {"NOTIFY_ALIVE_FILE": str(file)},
    )
    try:
        eventually(file.exists, "a sign of life")
    finally:
        mover.kill()
        mover.wait()


def test_no_sign_of_life_while_a_step_hangs(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2")
    monkeypatch.setenv("NOTIFY_ALIVE_FILE", str(tmp_path / "alive"))
    now = 0.0
    part = alive.Progress(lambda: now)

    async def run() -> list[str]:
        nonlocal now
        part.works()
        now = alive.STUCK_SECONDS + 1
        beating = asyncio.create_task(alive.beat(part))
        manager.setblocking(False)
        loop = asyncio.get_running_loop()
        told = [(await loop.sock_recv(manager, 4096)).decode()]
        for _ in range(100):  # many more turns than one beat needs
            await asyncio.sleep(0)
        assert not (tmp_path / "alive").exists()
        part.rests()
        told.append((await loop.sock_recv(manager, 4096)).decode())
        beating.cancel()
        return told

    assert asyncio.run(run()) == ["READY=1", "WATCHDOG=1"]
    assert (tmp_path / "alive").exists()


def test_without_a_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "vsock:2:1", "/nobody/listens/here"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        alive.tell("READY=1")
