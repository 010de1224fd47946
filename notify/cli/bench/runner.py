"""One measurement: a directory, servers, and processes that produce and consume, all of which end with it.

Each process takes a JSON specification, and prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from notify.errors import NotifyError
from notify.runtime.direct import open_directly
from notify.testing.process import ServerProcess

LONGEST_SECONDS = 3600.0
PRODUCERS = "notify.cli.bench.producers"
CONSUMERS = "notify.cli.bench.consumers"


class Process:
    """A process of a bench."""

    def __init__(self, module: str, spec: dict[str, Any], *, wait_for_line: bool = False) -> None:
        """Start a module. With `wait_for_line`, wait until it prints its first line: it is ready."""
        self.spec = spec
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(spec)], stdout=subprocess.PIPE, text=True
        )
        if wait_for_line:
            assert self._process.stdout is not None
            with ExitStack() as unless_ready:
                unless_ready.callback(self.end)
                self._process.stdout.readline()
                unless_ready.pop_all()

    def tell(self) -> None:
        """Tell consumers that wait for the file `stop` to end."""
        if stop := self.spec.get("stop"):
            Path(stop).touch()

    def result(self, seconds: float = LONGEST_SECONDS) -> dict[str, Any]:
        """Wait for its end; consumers that wait for the file `stop` are told. Raises NotifyError if it failed."""
        self.tell()
        try:
            output, _ = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NotifyError(f"a process of the bench had not ended after {seconds:g} s") from None
        finally:
            self.end()
        if self._process.returncode != 0:
            raise NotifyError(f"a process of the bench failed with exit code {self._process.returncode}")
        printed: dict[str, Any] = json.loads(output.splitlines()[-1])
        return printed

    def end(self) -> None:
        """Kill it if it still runs, because the bench was interrupted."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Bench:
    """One measurement. A context manager: at its end it stops everything that it started, and deletes its directory."""

    directory: Path

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-bench-")))
        self._started = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def server(self, name: str = "data", *flags: str) -> ServerProcess:
        """Start a server with its data directory `name`, and flags of `notify serve`."""
        server = ServerProcess(self.directory / name, flags=flags).start()
        self._stack.callback(server.stop)
        # A server that has just started spends a second of CPU on what operators need: a measurement begins after it.
        call(server.url, "GET", "/v1/admin/groups")
        return server

    def start(self, module: str, spec: dict[str, Any], *, wait_for_line: bool = False) -> Process:
        """Start a process, see `Process`."""
        process = Process(module, spec, wait_for_line=wait_for_line)
        self._stack.callback(process.end)
        return process

    def file(self, name: str) -> str:
        """The path of a file that no other process of this bench has."""
        self._started += 1
        return str(self.directory / f"{name}-{self._started}")

    def produce(self, url: str, *, clients: int, seconds: float, **others: Any) -> Process:
        """Start producers, whose result names the file of the acknowledged `ids`. `others`: see producers.py."""
        spec = {
            "url": url, "ids": self.file("ids"), "clients": clients, "all_clients": clients, "seconds": seconds,
            "body": 256, "topics": 16, "keys": 0, "rate": 0.0, "warmup": 1.0, "batching": True,
            "queues_outcomes": False,
        }  # fmt: skip
        return self.start(PRODUCERS, spec | others)

    def consume(self, url: str, groups: list[str], *, client: str = "wire", **others: Any) -> Process:
        """Start consumers, which are ready once this returns, and end when their result is asked for.

        `others`: see consumers.py.
        """
        spec = {"url": url, "groups": groups, "client": client, "stop": self.file("stop")}
        return self.start(CONSUMERS, spec | others, wait_for_line=True)


def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer of a route. Raises urllib.error.HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    with open_directly(request, 60) as answer:
        return json.loads(answer.read())


def subscribe(url: str, group: str, topic: str, **fields: Any) -> None:
    """Make a subscription from the earliest message on."""
    body = {"reason": "bench", "start": "earliest"} | fields
    call(url, "PUT", f"/v1/admin/groups/{group}/subscriptions/{topic}", body)
