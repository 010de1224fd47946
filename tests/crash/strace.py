"""fdatasync that fails in a real server process, by strace's fault injection."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from notify.server.database import open_database
from notify.testing.ports import free_port
from tests.support.clock import PATIENCE_SECONDS
from tests.support.http import ask
from tests.support.transactions import half_request


def fail_syncs(times: int) -> str:
    """Servers whose n-th fdatasync fails; what was done, or why it could not be."""
    if shutil.which("strace") is None:
        return "SKIPPED: there is no strace"
    for i in range(times):
        _one(10 + i * 5)
    return f"{times} servers with an injected EIO: each stopped"


def _one(fail_at: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="notify-eio-"))
    open_database(str(directory)).dispose()  # its syncs are not meant
    port = free_port()
    server = [sys.executable, "-m", "notify.cli.main", "serve", "--port", str(port), "--data-dir", str(directory)]
    inject = f"inject=fdatasync:error=EIO:when={fail_at}"
    # With the filter in the kernel only these calls stop it: it starts as quickly as untraced.
    words = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", os.devnull, "-e", "trace=fdatasync", "-e", inject, *server]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _send_until_it_is_gone(f"http://127.0.0.1:{port}", process)
        if process.returncode == 0:
            raise AssertionError("the server survived a failed fdatasync")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server that it traces, too
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _send_until_it_is_gone(url: str, process: subprocess.Popen[bytes]) -> None:
    """Send one half after the other. Raises AssertionError if it does not go within 500."""
    acknowledged = 0
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while process.poll() is None:
        try:
            acknowledged += ask(url, "POST", "/v1/transactions", half_request())[0] < 300
        except OSError:
            time.sleep(0.02)  # the pause between two tries: it starts, or goes
        assert acknowledged < 500, "500 halves were acknowledged in spite of a failed fdatasync"
        assert time.monotonic() < deadline, f"the server is still there after {acknowledged} halves"
    assert acknowledged, "the server was gone before it began"
