"""A receiver of a watch's alarms."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Takes alarms, or answers with `status`."""

    def __init__(self) -> None:
        self.status = 204
        self.refuses = ""
        """An alarm with this in its key is answered with 400."""
        self.location = ""
        """Where a redirect sends to."""
        self.swallows = False
        """Alarms are taken, and the connection ends without an answer."""
        self.swallowed = 0
        self.taken: list[dict[str, Any]] = []
        self.names: list[str] = []
        """The idempotency key of each that was taken."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status = 400 if receiver.refuses and receiver.refuses in body["key"] else receiver.status
                if status < 300:
                    receiver.taken.append(body)
                    receiver.names.append(self.headers["idempotency-key"])
                    if receiver.swallows:
                        receiver.swallowed += 1
                        self.close_connection = True
                        return
                self.send_response(status)
                if receiver.location:
                    self.send_header("location", receiver.location)
                self.end_headers()

            def do_GET(self) -> None:
                """As a redirect of a POST is followed."""
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def alarm_keys(self) -> list[str]:
        return [body["key"] for body in self.taken]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
