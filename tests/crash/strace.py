"""fdatasync that fails in a real server process, by strace's fault injection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from notify.client import AsyncTransactionProducer, Message
from notify.errors import NotifyError, Unavailable
from notify.server.admin.database import AdminDatabase
from notify.testing.ports import free_port


def fail_syncs(times: int) -> str:
    """Servers whose n-th fdatasync fails; what was done, or why it could not be."""
    if shutil.which("strace") is None:
        return "SKIPPED: there is no strace"
    for i in range(times):
        _one(10 + i * 5)
    return f"{times} servers with an injected EIO: each stopped, and acknowledged nothing after it"


def _one(fail_at: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="notify-eio-"))
    AdminDatabase(str(directory)).close()  # its syncs are not meant
    port = free_port()
    server = [sys.executable, "-m", "notify.cli.main", "serve", "--port", str(port), "--data-dir", str(directory)]
    inject = f"inject=fdatasync:error=EIO:when={fail_at}"
    process = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=fdatasync", "-e", inject, *server],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        asyncio.run(_send_until_refused(f"http://127.0.0.1:{port}"))
        if process.wait(20) == 0:
            raise AssertionError("the server survived a failed fdatasync")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server that it traces, too
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


async def _send_until_refused(url: str) -> None:
    """Send one message after the other until the server is gone; it has to go within 500."""
    async with AsyncTransactionProducer(url, group="g", half_timeout=6) as producer:
        until = time.monotonic() + 60
        while True:  # it starts slowly with every call of the system traced
            try:
                await producer.prepare([Message("t", "first")], check_after=3600)
                break
            except Unavailable:
                assert time.monotonic() < until, "the server did not start"
        for _ in range(500):
            try:
                await producer.prepare([Message("t", "x")], check_after=3600)
            except NotifyError:
                return
    raise AssertionError("500 halves were acknowledged in spite of a failed fdatasync")
