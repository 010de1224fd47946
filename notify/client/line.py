"""Line: a connection on which a thread itself sends a request to a server and reads the answer, without a loop."""

from __future__ import annotations

import socket
import ssl
import time

from notify.client.answers import AnswerReader
from notify.client.http import HttpClient
from notify.errors import Unavailable

RECEIVE_BYTES = 65_536


class Line(AnswerReader):
    """A connection with at most one request on its way. Belongs to one thread at a time.

    If the server or the network fails, its methods raise OSError (TimeoutError is one), and the line is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._socket: socket.socket | None = None
        self._answer: tuple[int, bytes] | None = None
        self._is_kept = True
        """Whether the server keeps the connection open after the last answer."""

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self, client: HttpClient, seconds: float) -> None:
        """Connect to the client's server; `seconds`: the timeout for the connection and for later answers."""
        connected = socket.create_connection(client.address, timeout=seconds)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = client.tls
            if tls is not None:
                connected = tls.wrap_socket(connected, server_hostname=client.address[0])
        except BaseException:
            connected.close()
            raise
        self._parser, self._answer = None, None
        self._socket = connected

    def send(self, request: bytes) -> None:
        """Send a request. Call `answer` for its answer."""
        if self._parser is not None:
            # A signal handler interrupted the wait for an earlier answer, which would be taken for this request's.
            self.close()
        connected = self._connected()
        self.expect()
        self._answer = None
        try:
            connected.sendall(request)
        except BaseException:
            self.close()
            raise

    def answer(self, seconds: float) -> tuple[int, bytes] | None:
        """Status and body of the answer; None if it has not come within `seconds`, but may still come."""
        deadline, remaining = time.monotonic() + seconds, seconds
        try:
            while self._answer is None:
                if not self._receive(remaining):
                    return None
                remaining = max(0.0, deadline - time.monotonic())
        except BaseException:
            self.close()
            raise
        if not self._is_kept:
            self.close()
        return self._answer

    def _receive(self, seconds: float) -> bool:
        """Read the bytes that have come; False if none came within `seconds`."""
        connected = self._connected()
        if connected.gettimeout() != seconds:
            connected.settimeout(seconds)
        try:
            data = connected.recv(RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        if not data:
            self.ended()
            if self._answer is None:
                raise ConnectionError("the server closed the connection")
            return True
        try:
            self.feed(data)
        except Unavailable as error:
            raise ConnectionError(str(error)) from None
        return True

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection was closed")
        return self._socket

    def answered(self, status: int, body: bytes, is_kept: bool) -> None:
        self._answer, self._is_kept = (status, body), is_kept

    def close(self) -> None:
        """Close the connection; a request on its way gets no answer."""
        closed, self._socket = self._socket, None
        if closed is not None:
            closed.close()
