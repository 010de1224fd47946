"""What the demo's shop runs on: one embedded server, or stateless servers over a database with a queue or Kafka."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from notify.demo.shop import GROUP
from notify.testing.process import ServerProcess

SERVERS = 3
QUICK_CHECKS = {"NOTIFY_CHECK_BACKOFF_SECONDS": "1"}


class Topology(Protocol):
    """Where producers and consumers go, what of it may be killed, and what it says at the end."""

    producer_url: str
    consumer_url: str

    def parts(self) -> list[str]:
        """What may be killed."""
        ...

    def kill(self, part: str) -> None:
        """Kill a part, and start it again."""
        ...

    def undecided(self) -> list[dict[str, Any]]: ...

    def lag(self, unsettled: int) -> int:
        """Messages that the shop's group has before it; `unsettled`: committed orders without an effect yet."""
        ...

    def state(self, transaction_id: str) -> str: ...

    def redelivered(self) -> int: ...

    def audit_flags(self) -> list[str]:
        """What `notify audit` is to read of it."""
        ...


class Embedded:
    """One server: transactions and queues in one log."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._server = ServerProcess(directory / "data", environment=QUICK_CHECKS).start()
        stack.callback(self._server.stop)
        self.producer_url = self.consumer_url = self._server.url

    def parts(self) -> list[str]:
        return ["server"]

    def kill(self, part: str) -> None:
        self._server.kill()
        self._server.start()

    def undecided(self) -> list[dict[str, Any]]:
        return undecided([self._server.url])

    def lag(self, unsettled: int) -> int:
        return group_lag(self._server.url)

    def state(self, transaction_id: str) -> str:
        return state([self._server.url], transaction_id)

    def redelivered(self) -> int:
        return metric(self._server.url, "notify_redelivered_total")

    def audit_flags(self) -> list[str]:
        return ["--log", str(self._server.data_dir)]


class Cluster:
    """Three stateless servers over a database, and a bridge (or relay) to a queue server or to Kafka."""

    def __init__(self, storage: str, directory: Path, stack: ExitStack, kafka_url: str | None = None) -> None:
        """`storage`: an empty database of PostgreSQL, MySQL or MariaDB. Raises NotifyError if something won't start."""
        from storage.sql import schema
        from storage.sql.dialects import open_engine

        engine = open_engine(storage)
        schema.upgrade(engine, "main")
        engine.dispose()
        self._servers = []
        for number in range(SERVERS):
            flags = ["--storage", storage]
            server = ServerProcess(directory / f"server-{number}", environment=QUICK_CHECKS, flags=flags).start()
            stack.callback(server.stop)
            self._servers.append(server)
        self._storage = storage
        self._queue: ServerProcess | None = None
        if kafka_url is None:
            flags = ["--registry", storage, "--roles", "queue"]
            self._queue = ServerProcess(directory / "queue", flags=flags).start()
            stack.callback(self._queue.stop)
            target = self._queue.url
        else:
            target = kafka_url
        what = "relay" if storage.startswith("postgresql") else "bridge"
        self._mover = [sys.executable, "-m", "notify.cli.main", what, "--dsn", storage, "--url", target]
        self._mover_name = what
        self._output = (directory / what).open("ab")
        stack.callback(self._output.close)
        self._moving = self._start_mover()
        stack.callback(self._stop_mover)
        # Any server is enough to find the others, and the queue.
        self.producer_url = self._servers[0].url
        self.consumer_url = kafka_url or self._servers[0].url

    def _start_mover(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._mover, stdout=self._output, stderr=self._output)

    def _stop_mover(self) -> None:
        self._moving.kill()
        self._moving.wait()

    @property
    def _urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def parts(self) -> list[str]:
        return ["server", self._mover_name] + (["queue"] if self._queue is not None else [])

    def kill(self, part: str) -> None:
        if part == "server":
            server = random.choice(self._servers)
            server.kill()
            server.start()
        elif part == "queue" and self._queue is not None:
            self._queue.kill()
            self._queue.start()
        else:
            self._stop_mover()
            self._moving = self._start_mover()

    def undecided(self) -> list[dict[str, Any]]:
        return undecided(self._urls)

    def lag(self, unsettled: int) -> int:
        return unsettled if self._queue is None else max(unsettled, group_lag(self._queue.url))

    def state(self, transaction_id: str) -> str:
        return state(self._urls, transaction_id)

    def redelivered(self) -> int:
        return 0 if self._queue is None else metric(self._queue.url, "notify_redelivered_total")

    def audit_flags(self) -> list[str]:
        queue = ["--kafka", self.consumer_url] if self._queue is None else ["--log", str(self._queue.data_dir)]
        return ["--storage", self._storage, *queue]


def undecided(urls: list[str]) -> list[dict[str, Any]]:
    """Undecided transactions, from the first server that answers."""
    rows: list[dict[str, Any]] = _from_any(urls, "/v1/admin/transactions?max=10000")["transactions"]
    return rows


def state(urls: list[str], transaction_id: str) -> str:
    return str(_from_any(urls, f"/v1/admin/transactions/{transaction_id}")["state"])


def group_lag(url: str) -> int:
    groups = _from_any([url], "/v1/admin/groups")["groups"]
    return sum(group["lag"] for group in groups if group["name"] == GROUP)


def metric(url: str, name: str) -> int:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return int(float(line.split()[1]))
    return 0


def _from_any(urls: list[str], path: str) -> dict[str, Any]:
    for url in urls:
        try:
            with urllib.request.urlopen(url + path, timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError:
            raise
        except OSError:
            if url == urls[-1]:
                raise
    raise AssertionError("no address")
