"""`notify serve` as a child process: for tests that kill and restart a server, for benchmarks, and for the demo."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, Protocol

from notify.errors import Unavailable
from notify.runtime.direct import open_directly
from notify.testing import usage
from notify.testing.ports import free_port


class Child(Protocol):
    """The part of `subprocess.Popen[str]` that `ServerProcess` uses."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Start `notify` with these arguments and exactly this environment; stderr is merged into stdout."""
    return subprocess.Popen(
        [sys.executable, "-m", "notify.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )


class ServerProcess:
    """A server process on a free port. `url` is the server's address once the server is ready.

    server = ServerProcess(tmp_path / "data").start()
    ...
    server.kill()       # as a crash would
    server.start()      # the same data directory, the same port
    server.stop()
    """

    launch: ClassVar[staticmethod[[Sequence[str], Mapping[str, str]], Child]] = staticmethod(launch)
    """Starts a process; `notify.testing.forked.launch` does so faster."""

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        environment: dict[str, str] | None = None,
        flags: Sequence[str] = (),
        ca: Path | None = None,
    ) -> None:
        """`port` 0: a free port, which restarts keep. `ca`: the authority of the server's certificate, if any."""
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self.data_dir = data_dir
        self._port = port or free_port()
        self._environment = environment or {}
        self._flags = flags
        self.url = ""
        self.process: Child | None = None
        self.output: list[str] = []
        self.ready_seconds = 0.0
        self._reader: threading.Thread | None = None

    def start(self, seconds: float = 120.0) -> ServerProcess:
        """Start the server and wait until it is ready. Raises Unavailable, with the server's last output."""
        began = time.perf_counter()
        arguments = ["serve", "--port", str(self._port), "--data-dir", str(self.data_dir), *self._flags]
        self.process = self.launch(arguments, os.environ | self._environment)
        self.output = []
        self._reader = threading.Thread(target=self._read, args=(self.process, self.output), daemon=True)
        self._reader.start()
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            if self._becomes_ready(self.process, seconds):
                self.ready_seconds = time.perf_counter() - began
                unless_ready.pop_all()
                return self
        raise Unavailable("the server did not become ready: " + "".join(self.output)[-2000:])

    def _becomes_ready(self, process: Child, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            if not self.url and (address := re.search(r"https?://[0-9.:]+", "".join(self.output))):
                self.url = address[0]
            if self.url and self._is_ready():
                return True
            time.sleep(0.02)  # the pause between two polls
        return False

    def _read(self, process: Child, output: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout, contextlib.suppress(ValueError):  # a child of the server may hold the pipe longer
            for line in process.stdout:
                output.append(line)
                del output[:-200]

    def _is_ready(self) -> bool:
        try:
            with open_directly(self.url + "/readyz", 10, self._tls) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server with SIGKILL, as if it had crashed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self._wait(60)

    def stop(self, seconds: float = 60.0) -> int:
        """Stop with SIGTERM, wait, and return the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self._wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _wait(self, seconds: float) -> int:
        assert self.process is not None
        code = self.process.wait(seconds)
        if self._reader is not None:
            self._reader.join(5)
        return code

    def cpu_seconds(self) -> float:
        """The CPU time of the process so far, in seconds (Linux)."""
        assert self.process is not None
        return usage.cpu_seconds(self.process.pid)

    def workers(self) -> list[int]:
        """The process ids of the workers, in no order; empty without `--workers` (Linux)."""
        assert self.process is not None
        return usage.children(self.process.pid)

    def anonymous_bytes(self) -> int:
        """The memory of the process without mapped files (RssAnon), in bytes (Linux)."""
        assert self.process is not None
        return usage.anonymous_bytes(self.process.pid)
