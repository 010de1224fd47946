"""A receiver of the server's signed webhooks."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any

SECRET = "a secret of the tests"


class Receiver:
    """Receives webhooks at `url`, whose host and port are `place`."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.unsigned = 0
        self.status = 200
        self.status_of: Callable[[dict[str, Any]], int] = lambda asked: self.status
        """The status of the answer to such a body."""
        self.location = ""
        """Where a redirect sends to."""
        self.answer: Callable[[dict[str, Any]], Any] = lambda asked: {}
        """Makes the body of the answer from that of the request."""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fields = dict(part.split("=") for part in self.headers["notify-signature"].split(","))
                proof = hmac.new(SECRET.encode(), f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
                if not hmac.compare_digest(proof, fields["v1"]) or abs(time.time() - int(fields["t"])) > 3600:
                    receiver.unsigned += 1
                asked = json.loads(body)
                receiver.received.append(asked)
                answer = json.dumps(receiver.answer(asked)).encode()
                self.send_response(receiver.status_of(asked))
                if receiver.location:
                    self.send_header("location", receiver.location)
                self.send_header("content-length", str(len(answer)))
                with contextlib.suppress(ConnectionError):  # who asked does not wait any longer
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._handler = Handler
        self._open(0)
        self.place = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.place}/notify"

    def _open(self, port: int) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Take no connections any more."""
        self._server.shutdown()
        self._server.server_close()

    def reopen(self) -> None:
        """Listen on the same port again."""
        self._open(int(self.place.rpartition(":")[2]))
