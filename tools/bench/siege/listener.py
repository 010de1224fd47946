"""Servers of the attackers: a webhook that answers byte by byte, and an identity provider that is silent."""

from __future__ import annotations

import contextlib
import socket
import threading


class Listener:
    """Accepts connections, and answers slowly, byte by byte, or not at all."""

    def __init__(self, drip: bytes) -> None:
        self._drip = drip
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._drip:
                connection.sendall(b"HTTP/1.1 200 OK\r\nx-a: ")
            while not self._ended.wait(0.5):
                connection.sendall(self._drip)

    def close(self) -> None:
        self._ended.set()
        self._listening.close()
