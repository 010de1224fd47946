"""The real nginx as a proxy before a server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from notify.testing.guardian import register
from notify.testing.ports import free_port
from notify.testing.reachable import NotAvailable
from tests.support.clock import eventually
from tests.support.http import ask


class Nginx:
    """nginx on a free port, with its default settings unless told otherwise. `url` leads through it.

    `targets`: the addresses (`http://host:port`) behind it, in turn; `http`, `location`: further lines of these blocks.
    """

    def __init__(self, directory: Path, *targets: str, http: str = "", location: str = "") -> None:
        """Raises NotAvailable where nginx is not installed."""
        program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
        if program is None:
            raise NotAvailable("no nginx: Debian's package nginx has it")
        directory.mkdir(parents=True, exist_ok=True)
        self._program = program
        self._directory = directory
        self._file = directory / "nginx.conf"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.configure(*targets, http=http, location=location)

    def configure(self, *targets: str, http: str = "", location: str = "") -> None:
        """Write the configuration; a running nginx follows at `reload`. Without targets, `location` answers."""
        upstream, passed = "", f"proxy_pass {targets[0]};" if targets else ""
        if len(targets) > 1:  # nginx would send the name of the group as the host
            servers = "".join(f"server {target.removeprefix('http://')}; " for target in targets)
            upstream = f"upstream notify {{ {servers}}}"
            passed = "proxy_pass http://notify; proxy_set_header Host $http_host;"
        rooms = " ".join(
            f"{name}_temp_path {self._directory}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root; " if os.getuid() == 0 else ""  # its workers write large bodies into this directory
        self._file.write_text(
            f"{user}daemon off; worker_processes 1; pid {self._directory}/pid; error_log {self._directory}/error.log;\n"
            f"events {{}}\nhttp {{\naccess_log off; {rooms}\n{http}\n{upstream}\n"
            f"server {{ listen 127.0.0.1:{self.port}; location / {{ {passed} {location} }} }}\n}}\n"
        )

    def start(self) -> Nginx:
        """Start it, and wait until it answers."""
        command = [
            self._program,
            "-c",
            str(self._file),
            "-p",
            str(self._directory),
            "-e",
            f"{self._directory}/error.log",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        register(self._process.pid)
        eventually(self._answers, "nginx to answer")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self._directory / "error.log").read_text()[-2000:])
        try:
            return bool(ask(self.url, "GET", "/readyz")[0])
        except OSError:
            return False

    def reload(self) -> None:
        """Follow the configuration: new workers start, and old ones end after their requests."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Stop at once: connections are cut."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)


@contextmanager
def nginx(directory: Path, *targets: str, http: str = "", location: str = "") -> Iterator[Nginx]:
    """A running Nginx; see there."""
    proxy = Nginx(directory, *targets, http=http, location=location)
    try:
        yield proxy.start()
    finally:
        proxy.stop()
