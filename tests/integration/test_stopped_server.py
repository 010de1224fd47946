"""A server's process that is stopped for a while, as by a debugger or a machine that sleeps, and continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.groups import Caller, publish, subscribe
from tests.support.servers import stop_if_running

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
