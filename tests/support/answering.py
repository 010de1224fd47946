"""Programs of others that speak HTTP: each request is answered by a function."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Request = http.server.BaseHTTPRequestHandler


class Answering:
    """A server on loopback that calls `answer` with each request, to write what is answered."""

    def __init__(self, answer: Callable[[Request], object], port: int = 0) -> None:
        class Handler(Request):
            def do_GET(self) -> None:
                answer(self)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._running = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._running.start()

    def close(self) -> None:
        """Take no connections any more."""
        self._server.shutdown()
        self._server.server_close()
        self._running.join()


def body_of(request: Request) -> bytes:
    """The body of a request."""
    return request.rfile.read(int(request.headers["content-length"] or 0))


def reply(request: Request, body: bytes = b"", status: int = 200, **headers: str) -> None:
    """Answer a request; nothing happens if whoever asked waits no longer."""
    request.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    with contextlib.suppress(ConnectionError):
        request.end_headers()
        request.wfile.write(body)


@contextmanager
def answering(answer: Callable[[Request], object]) -> Iterator[Answering]:
    """A server that answers so during the block."""
    with contextlib.closing(Answering(answer)) as server:
        yield server
