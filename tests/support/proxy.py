"""A TCP proxy that loses data on demand, as networks do at the worst moment."""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from tests.support.clock import PATIENCE_SECONDS


def unencrypted(url: sa.URL) -> sa.URL:
    """The URL of a database whose driver does not encrypt: a proxy has to see what it cuts. PyMySQL does with MySQL."""
    return url.update_query_dict({"ssl_disabled": "true"}) if url.get_driver_name() == "pymysql" else url


class Proxy:
    """Forwards 127.0.0.1:`port` to a target. Faults apply to open and later connections.

    `cut_at(pattern, answer)`: the first time a client's bytes match, both ends are closed, before the bytes are passed
    on or (`answer`) after the target has answered. `drop_answers`: the target's bytes are dropped, nothing is closed.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._cut_at: re.Pattern[bytes] | None = None
        self._after_answer = False
        self._open: set[socket.socket] = set()
        self.drop_answers = False
        self.may_answer = threading.Event()
        """While it is not set, the target's bytes wait here."""
        self.may_answer.set()
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, pattern: bytes, *, answer: bool) -> None:
        self._cut_at, self._after_answer = re.compile(pattern), answer

    @property
    def has_cut(self) -> bool:
        """Whether what `cut_at` asked for last has happened."""
        return self._cut_at is None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    target = socket.create_connection(self._target)
                except OSError:  # the target is unreachable
                    client.close()
                    continue
                self._open |= {client, target}
                answered: list[bool] = []
                self._start(self._to_target, client, target, answered)
                self._start(self._to_client, target, client, answered)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()

    def _to_target(self, client: socket.socket, target: socket.socket, cutting: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._cut_at is not None and self._cut_at.search(data):
                    self._cut_at = None
                    self.cuts += 1
                    if not self._after_answer:
                        break
                    cutting.append(True)
                target.sendall(data)
        self._close(client, target)

    def _to_client(self, target: socket.socket, client: socket.socket, cutting: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := target.recv(65536):
                if cutting:
                    break
                self.may_answer.wait(PATIENCE_SECONDS)
                if not self.drop_answers:
                    client.sendall(data)
        self._close(client, target)

    def _close(self, *sockets: socket.socket) -> None:
        for s in sockets:
            self._open.discard(s)
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def close(self) -> None:
        """Stop listening, and cut open connections."""
        self._close(self._listening, *list(self._open))

    def reopen(self) -> None:
        """Listen on the same port again."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def send_what_is_taken(sent: Mapping[socket.socket, bytes], still_seconds: float) -> None:
    """Send on each connection until all is sent, or the server has read no more for so long."""
    left = {connection: memoryview(data) for connection, data in sent.items()}
    with selectors.DefaultSelector() as selector:
        for connection in left:
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE)
        while left:
            writable = [key.fileobj for key, _ in selector.select(still_seconds)]
            if not writable:
                return
            for connection in writable:
                assert isinstance(connection, socket.socket)
                try:
                    left[connection] = left[connection][connection.send(left[connection][:65_536]) :]
                except ConnectionError:
                    left[connection] = memoryview(b"")  # the server has refused it
                if not left[connection]:
                    del left[connection]
                    selector.unregister(connection)
