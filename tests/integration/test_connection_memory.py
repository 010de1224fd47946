"""The server holds a bounded amount for all its connections together, whoever opens them, and gives memory back."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from notify.server.connections.held import HELD_BYTES
from notify.testing import usage
from notify.testing.process import ServerProcess
from tests.support.clock import eventually
from tests.support.http import ask
from tests.support.proxy import send_what_is_taken

MEGABYTE = 1 << 20
STILL_SECONDS = 1.0
"""How long no connection takes any more bytes before a test says that the server reads no more."""
BESIDE_BYTES = 30 * MEGABYTE
"""Memory beside what is held: connections, and a body that is put together."""


def begun(token: str, worker: str) -> list[bytes]:
    """Requests that never end: 120 MB of bodies, 40 MB of forms, 24 MB of heads."""
    shown = f"authorization: Bearer {token}\r\n" if token else ""
    body = f"POST {worker}/v1/messages HTTP/1.1\r\nhost: localhost\r\n{shown}content-length: {8 * MEGABYTE}\r\n\r\n"
    form = f"POST {worker}/do/settings.put HTTP/1.1\r\nhost: localhost\r\n{shown}content-length: {MEGABYTE}\r\n\r\n"
    login = f"POST {worker}/login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 24000\r\n\r\n"
    head = f"GET {worker}/livez HTTP/1.1\r\nhost: localhost\r\nx-a: "
    return [
        *[body.encode() + b" " * (8 * MEGABYTE - 1)] * 15,
        *[form.encode() + b"x" * (MEGABYTE - 1)] * 40,
        *[login.encode() + b"x" * 20_000] * 20,
        *[head.encode() + b"y" * 60_000] * 400,
    ]


def held_bytes(server: ServerProcess) -> int:
    assert server.process is not None
    return sum(usage.anonymous_bytes(pid) for pid in (server.process.pid, *server.workers()))


@pytest.mark.parametrize("access", [True, False])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_memory_held_for_all_connections_is_bounded(tmp_path: Path, workers: int, access: bool) -> None:
    """Requests that never ended held all that was sent: 150 bodies of 8 MiB 1.3 GB, 1,000 forms more than 1 GB."""
    flags = ["--workers", str(workers)] if workers > 1 else []
    server = ServerProcess(tmp_path / "data", environment={"NOTIFY_ACCESS": "1"} if access else {}, flags=flags)
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        token = (tmp_path / "data" / "admin.token").read_text().strip() if access else ""
        address = urlsplit(server.url)
        message = {"messages": [{"topic": "order", "body": "x"}]}
        assert ask(server.url, "POST", "/v1/messages", message, token=token)[0] == 200
        before = held_bytes(server)
        sent = {}
        for number in range(workers):
            for data in begun(token, f"/worker-{number + 1}" if workers > 1 else ""):
                connection = stack.enter_context(socket.create_connection((address.hostname or "", address.port or 0)))
                sent[connection] = data
        send_what_is_taken(sent, STILL_SECONDS)
        assert ask(server.url, "POST", "/v1/messages", message, token=token)[0] == 200
        assert held_bytes(server) - before < max(HELD_BYTES, workers * (36 << 20)) + BESIDE_BYTES
        for connection in sent:
            with contextlib.suppress(OSError):
                connection.close()
        eventually(lambda: held_bytes(server) - before < BESIDE_BYTES, "memory to be given back")
