"""The servers of the demo: one embedded server; or stateless servers on a database, with a queue server or Kafka."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from notify.cli.demo_shop.children import last_lines
from notify.cli.demo_shop.shop import GROUP
from notify.errors import Unavailable
from notify.runtime.direct import open_directly
from notify.testing.process import ServerProcess

SERVERS = 3
QUICK_CHECKS = {"NOTIFY_CHECK_BACKOFF_SECONDS": "1"}
START_SECONDS = 180.0
"""The longest time that a server may take to start, on a slow and loaded machine."""
STOP_SECONDS = 120.0
ANSWER_SECONDS = 60.0
"""The longest wait until one of the servers answers an admin request."""
LINES = 10
"""The number of last lines of a part's output that a failed demo shows."""


class Topology(Protocol):
    """The servers that producers and consumers use; some parts may be killed."""

    producer_url: str
    consumer_url: str

    def parts(self) -> list[str]:
        """The processes that may be killed."""
        ...

    def kill(self, part: str) -> None:
        """Kill a part, and start it again. Raises Unavailable if it does not become ready."""
        ...

    def ended(self) -> dict[str, int]:
        """The exit codes of the parts that ended by themselves."""
        ...

    def last_words(self) -> dict[str, list[str]]:
        """The last lines of each part's output."""
        ...

    def undecided(self) -> list[dict[str, Any]]: ...

    def lag(self, unsettled: int) -> int:
        """The lag of the shop's group in messages. `unsettled`: how many committed orders have no effect yet."""
        ...

    def transaction(self, transaction_id: str) -> dict[str, Any]:
        """The `state` and the `checks` of a transaction, from the servers."""
        ...

    def redelivered(self) -> int: ...

    def audit_flags(self) -> list[str]:
        """The flags of `notify audit` that name the inputs."""
        ...


class Embedded:
    """One server: transactions and queues in one log."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._server = ServerProcess(directory / "data", environment=QUICK_CHECKS)
        _start(self._server, "server")
        stack.callback(self._server.stop, STOP_SECONDS)
        self.producer_url = self.consumer_url = self._server.url

    def parts(self) -> list[str]:
        return ["server"]

    def kill(self, part: str) -> None:
        self._server.kill()
        _start(self._server, part)

    def ended(self) -> dict[str, int]:
        return _ended({"server": self._server})

    def last_words(self) -> dict[str, list[str]]:
        return _last_words({"server": self._server})

    def undecided(self) -> list[dict[str, Any]]:
        return undecided([self._server.url])

    def lag(self, unsettled: int) -> int:
        return group_lag(self._server.url)

    def transaction(self, transaction_id: str) -> dict[str, Any]:
        return transaction([self._server.url], transaction_id)

    def redelivered(self) -> int:
        return metric(self._server.url, "notify_redelivered_total")

    def audit_flags(self) -> list[str]:
        return ["--log", str(self._server.data_dir)]


class Cluster:
    """Three stateless servers on a database, and a bridge (or relay) to a queue server or to Kafka."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack, kafka_url: str | None = None) -> None:
        """`storage`: an empty database of PostgreSQL, MySQL or MariaDB. Raises NotifyError if a part does not start."""
        from notify.storage.sql import schema
        from notify.storage.sql.engines import open_engine

        engine = open_engine(storage)
        schema.upgrade(engine, "main")
        engine.dispose()
        self._servers = []
        for number in range(SERVERS):
            flags = ["--storage", storage]
            server = ServerProcess(directory / f"server-{number}", environment=QUICK_CHECKS, flags=flags)
            _start(server, f"server {number + 1}")
            stack.callback(server.stop, STOP_SECONDS)
            self._servers.append(server)
        self._storage = storage
        self._queue: ServerProcess | None = None
        if kafka_url is None:
            flags = ["--registry", storage, "--roles", "queue"]
            self._queue = ServerProcess(directory / "queue", flags=flags)
            _start(self._queue, "queue")
            stack.callback(self._queue.stop, STOP_SECONDS)
            target = self._queue.url
        else:
            target = kafka_url
        mover = "relay" if storage.startswith("postgresql") else "bridge"
        self._mover = [sys.executable, "-m", "notify.cli.main", mover, "--dsn", storage, "--url", target]
        self._mover_name = mover
        self._mover_output = directory / mover
        self._output = self._mover_output.open("ab")
        stack.callback(self._output.close)
        self._mover_process = self._start_mover()
        stack.callback(self._stop_mover)
        # Clients discover all other servers and the queue through any server.
        self.producer_url = self._servers[0].url
        self.consumer_url = kafka_url or self._servers[0].url

    def _start_mover(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._mover, stdout=self._output, stderr=self._output)

    def _stop_mover(self) -> None:
        self._mover_process.kill()
        self._mover_process.wait()

    @property
    def _urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def parts(self) -> list[str]:
        return ["server", self._mover_name] + (["queue"] if self._queue is not None else [])

    def kill(self, part: str) -> None:
        if part == "server":
            server = random.choice(self._servers)
            server.kill()
            _start(server, part)
        elif part == "queue" and self._queue is not None:
            self._queue.kill()
            _start(self._queue, part)
        else:
            self._stop_mover()
            self._mover_process = self._start_mover()

    @property
    def _processes(self) -> dict[str, ServerProcess]:
        servers = {f"server {number}": server for number, server in enumerate(self._servers, 1)}
        return servers | ({} if self._queue is None else {"queue": self._queue})

    def ended(self) -> dict[str, int]:
        code = self._mover_process.poll()
        return _ended(self._processes) | ({} if code is None else {self._mover_name: code})

    def last_words(self) -> dict[str, list[str]]:
        return _last_words(self._processes) | {self._mover_name: last_lines(self._mover_output, LINES)}

    def undecided(self) -> list[dict[str, Any]]:
        return undecided(self._urls)

    def lag(self, unsettled: int) -> int:
        return unsettled if self._queue is None else max(unsettled, group_lag(self._queue.url))

    def transaction(self, transaction_id: str) -> dict[str, Any]:
        return transaction(self._urls, transaction_id)

    def redelivered(self) -> int:
        return 0 if self._queue is None else metric(self._queue.url, "notify_redelivered_total")

    def audit_flags(self) -> list[str]:
        queue = ["--kafka", self.consumer_url] if self._queue is None else ["--log", str(self._queue.data_dir)]
        return ["--storage", self._storage, *queue]


def _start(server: ServerProcess, name: str) -> None:
    """Start a server. Raises Unavailable with its last line if it does not become ready; a file then has its output."""
    try:
        server.start(START_SECONDS)
    except Unavailable:
        server.data_dir.with_name(f"{name}.output").write_text("".join(server.output))
        line = "".join(server.output[-1:]).strip() or "it wrote nothing"
        raise Unavailable(f"the {name} did not become ready: {line}") from None


def _ended(servers: dict[str, ServerProcess]) -> dict[str, int]:
    codes = {name: server.process.poll() for name, server in servers.items() if server.process is not None}
    return {name: code for name, code in codes.items() if code is not None}


def _last_words(servers: dict[str, ServerProcess]) -> dict[str, list[str]]:
    return {name: [line.rstrip() for line in server.output[-LINES:]] for name, server in servers.items()}


def undecided(urls: list[str]) -> list[dict[str, Any]]:
    """The undecided transactions, from the first server that answers."""
    rows: list[dict[str, Any]] = json.loads(_answer(urls, "/v1/admin/transactions?max=10000"))["transactions"]
    return rows


def transaction(urls: list[str], transaction_id: str) -> dict[str, Any]:
    """The state of a transaction, and its checks from every server: each server records only its own, in memory."""
    records = [json.loads(_answer([url], f"/v1/admin/transactions/{transaction_id}")) for url in urls]
    checks = sorted((check for record in records for check in record["checks"]), key=lambda check: check["at"])
    return {"state": records[0]["state"], "checks": checks}


def group_lag(url: str) -> int:
    groups = json.loads(_answer([url], "/v1/admin/groups"))["groups"]
    return sum(group["lag"] for group in groups if group["name"] == GROUP)


def metric(url: str, name: str) -> int:
    for line in _answer([url], "/metrics").decode().splitlines():
        if line.startswith(name + " "):
            return int(float(line.split()[1]))
    return 0


def _answer(urls: list[str], path: str) -> bytes:
    """The answer of the first server that answers; all are tried in turn. Raises Unavailable with the last reason."""
    until = time.monotonic() + ANSWER_SECONDS
    while True:
        for url in urls:
            try:
                with open_directly(url + path, 10) as answer:
                    return bytes(answer.read())
            except (OSError, http.client.HTTPException) as error:
                reason = f"{url}{path}: {error}"
        if time.monotonic() > until:
            raise Unavailable(f"no server answered within {ANSWER_SECONDS:g} s, {reason}")
        time.sleep(0.2)
