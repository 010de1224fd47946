"""A server whose output nobody reads any more: the process behind a pipe has ended, or journald was started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from notify.testing import usage
from notify.testing.forked import launch
from notify.testing.ports import free_port
from tests.support.clock import eventually
from tests.support.http import admin, ask


def is_ready(url: str) -> bool:
    try:
        return ask(url, "GET", "/readyz")[0] == 200
    except OSError:
        return False


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
