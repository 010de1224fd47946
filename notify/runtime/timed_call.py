"""An HTTP call with urllib that ends in time, however slowly the server answers: urllib's own timeout starts again with
each byte. Proxies come from the environment, but for this machine itself: its own addresses are others to a proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from notify.runtime.addresses import connected_within, is_loopback
from notify.runtime.direct import Stay


def answer_to(request: urllib.request.Request | str, seconds: float, most: int, *, follow: bool = True) -> bytes:
    """Make a call that takes at most `seconds`; returns at most `most` bytes of the answer's body. Without `follow`, a
    redirect is an error.

    Raises OSError; for a status other than success it is an HTTPError.
    """
    deadline = _Deadline(seconds)
    handlers: list[Any] = [_Watching(deadline), *_proxies(request), *([] if follow else [Stay])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
            body: bytes = answer.read(most)
        if deadline.is_over:  # urllib takes a head that was cut off for a complete one
            raise TimeoutError(f"no whole answer within {seconds:g} s")
        return body
    except (http.client.HTTPException, ValueError) as error:  # ValueError: an invalid host name
        raise OSError(f"no answer of HTTP: {error!r}") from error
    finally:
        deadline.end()


def _proxies(request: urllib.request.Request | str) -> list[urllib.request.ProxyHandler]:
    """The handler that replaces urllib's own where no proxy may be asked."""
    url = request if isinstance(request, str) else request.full_url
    return [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []


class _Deadline:
    """Closes the connections of a call when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self.cut)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, connection: socket.socket) -> None:
        """Add a connection of the call; one that is made when the time is over is closed at once.

        A duplicate is kept, because TLS detaches the connection's own socket before its handshake.
        """
        self._connections.append(connection.dup())
        if self.is_over:
            self.cut()

    def cut(self) -> None:
        """The time is over: close the call's connections."""
        self.is_over = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the connection is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Stop the timer, once the call is over."""
        self._timer.cancel()
        for connection in self._connections:
            connection.close()


class _Watching(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections that the deadline closes, from the moment at which they are made."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()

        class Plain(http.client.HTTPConnection):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                self._create_connection = connected_within

            def connect(self) -> None:
                super().connect()
                deadline.watch(self.sock)

        class Secure(http.client.HTTPSConnection, Plain):
            """Its connect calls that of Plain, and begins TLS then."""

        self._plain, self._secure = Plain, Secure

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._plain, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._secure, req)
