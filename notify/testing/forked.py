"""Forks `notify …` from one process that has imported everything, for suites that start many servers.

The imports of `notify serve` take a second of CPU. A suite pays for them only once if it does this before its first
server:

    from notify.testing import ServerProcess, forked

    ServerProcess.launch = staticmethod(forked.launch)

A child is an ordinary server process: it has its own session, and signals reach only this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from subprocess import TimeoutExpired
from typing import IO

PRELOADED = (
    "notify.server.serve", "notify.server.app",
    # Only some processes need these. The fork server skips modules that are not installed.
    "notify.storage.sql.schema", "notify.storage.sql.shards", "notify.server.groups.kafka.engine",
    "notify.binlog_bridge.bridge", "notify.movers.relay.relay", "notify.movers.sinks.kafka",
    "sqlalchemy.dialects.mysql.pymysql", "sqlalchemy.dialects.postgresql.psycopg", "psycopg", "pymysql",
    "pydantic.v1",  # FastAPI imports it when it adds the first route
    "notify.testing.preloaded",  # must be the last one
)  # fmt: skip


class Forked:
    """A child process and its output, with those methods of `subprocess.Popen` that `ServerProcess` uses."""

    def __init__(self, process: ForkServerProcess, stdout: IO[str], arguments: Sequence[str]) -> None:
        self._process = process
        self._arguments = arguments
        self.stdout: IO[str] | None = stdout

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; negative if a signal killed the child; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired(list(self._arguments), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the child has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Start `notify` with these arguments and exactly this environment; stderr is merged into stdout."""
    reading, writing = context().Pipe(duplex=False)
    process = context().Process(target=_run, args=(list(arguments), dict(environment), os.getcwd(), writing))
    process.start()
    writing.close()
    stdout = os.fdopen(os.dup(reading.fileno()), "r", encoding="utf-8", errors="replace")
    reading.close()
    return Forked(process, stdout, arguments)


@cache
def context() -> ForkServerContext:
    """The context of the fork server. A suite can also fork other children from it (`context().Process(target=…)`)."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(list(PRELOADED))
    return forkserver


def _run(arguments: list[str], environment: dict[str, str], directory: str, writing: Connection) -> None:
    """Run `notify` in the child."""
    from notify.cli import main
    from notify.storage import crash_point

    os.setsid()
    threading.Thread(target=_die_with_the_parent, daemon=True).start()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(writing.fileno(), number)
    writing.close()
    # The streams of the fork server may be files, which can seek; a pipe cannot.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    crash_point.arm(environment.get("NOTIFY_CRASH_AT", ""))
    sys.argv = ["notify", *arguments]
    main.main()


def _die_with_the_parent() -> None:
    """Kill this child when the suite ends, even if the suite was killed."""
    suite = multiprocessing.parent_process()
    assert suite is not None
    suite.join()
    os.kill(os.getpid(), signal.SIGKILL)
