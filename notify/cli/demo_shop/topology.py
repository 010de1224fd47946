"""The servers of the demo. `make cluster-demo` has others (tests/cluster_demo.py)."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from notify.cli.demo_shop.shop import GROUP
from notify.errors import Unavailable
from notify.runtime.direct import open_directly
from notify.testing.process import ServerProcess

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
        start_server(self._server, "server")
        stack.callback(self._server.stop, STOP_SECONDS)
        self.producer_url = self.consumer_url = self._server.url

    def parts(self) -> list[str]:
        return ["server"]

    def kill(self, part: str) -> None:
        self._server.kill()
        start_server(self._server, part)

    def ended(self) -> dict[str, int]:
        return ended_codes({"server": self._server})

    def last_words(self) -> dict[str, list[str]]:
        return last_lines_of({"server": self._server})

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


def start_server(server: ServerProcess, name: str) -> None:
    """Start a server. Raises Unavailable with its last line if it does not become ready; a file then has its output."""
    try:
        server.start(START_SECONDS)
    except Unavailable:
        server.data_dir.with_name(f"{name}.output").write_text("".join(server.output))
        line = "".join(server.output[-1:]).strip() or "it wrote nothing"
        raise Unavailable(f"the {name} did not become ready: {line}") from None


def ended_codes(servers: dict[str, ServerProcess]) -> dict[str, int]:
    codes = {name: server.process.poll() for name, server in servers.items() if server.process is not None}
    return {name: code for name, code in codes.items() if code is not None}


def last_lines_of(servers: dict[str, ServerProcess]) -> dict[str, list[str]]:
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
