"""The one port of several workers: the parent accepts each connection, and hands it to the worker that it is meant for.

The path of a connection's first request names the worker: `/worker-2/v1/…`. The parent peeks at the first bytes without
reading them, and hands the open socket over; it has no part in the requests. A connection whose path names no worker is
handed to the first worker that is ready. TLS hides the path: with TLS each worker has a port instead.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from notify.server.connections.quota import open_files

log = structlog.get_logger("notify.server")

SILENT_SECONDS = 5.0
"""A connection that has sent nothing for this long is handed to any worker, whose time limits apply from then on."""
WAITING_SECONDS = 10.0
"""How long a connection waits for its worker to be started again."""
MOST = 500
"""The most connections of each kind that the parent holds: silent ones, and those that wait for their worker. The bound
is lower if this would be more than a quarter of the files that it may open."""
AGAIN_SECONDS = 0.02
"""How often the parent peeks again at a connection, or tries again to hand one to a busy worker."""
PAUSE_SECONDS = 0.2
"""How long the parent accepts no connection after it ran out of open files."""
AT_ONCE = 64
"""Connections that are accepted in one turn of the loop."""
PEEKED = 64
"""Bytes that the parent peeks at: more than a path needs to name a worker."""

_WHOLE = re.compile(rb"[A-Z]{1,16} /(?:worker-([0-9]{1,2})/)?")
_PART = re.compile(rb"[A-Z]{0,16}|[A-Z]{1,16} (?:/(?:w(?:o(?:r(?:k(?:e(?:r(?:-[0-9]{0,2})?)?)?)?)?)?)?)?")


def worker_of(first: bytes) -> int | None:
    """The number, from 0, of the worker that a connection's first bytes name; -1 if they name none; None if more bytes
    are needed to tell."""
    if len(first) < PEEKED and _PART.fullmatch(first):
        return None
    match = _WHOLE.match(first)
    return int(match[1]) - 1 if match and match[1] else -1


class Acceptor:
    """Accepts and hands over connections, on the parent's loop, which calls what each socket is registered with."""

    def __init__(
        self, selector: selectors.BaseSelector, listening: socket.socket, hand: Callable[[int, socket.socket], bool]
    ) -> None:
        """`hand` hands a connection to the worker of a number (-1: to any), and returns False if it takes none now."""
        self._selector = selector
        self._listening = listening
        self._hand = hand
        files = open_files()
        self._most = MOST if files is None else min(MOST, files // 4)
        self._silent: deque[tuple[float, socket.socket]] = deque()
        """Connections that have not named a worker yet, each with the time at which it was accepted."""
        self._looked: set[socket.socket] = set()
        """Silent connections that have sent a part of a path: `tick` peeks at them again."""
        self._waiting: deque[tuple[float, int, socket.socket]] = deque()
        """Connections whose worker takes none now: since when, the worker's number, the connection."""
        self._accept_at = 0.0
        """When to accept again after the process ran out of open files; 0 while it accepts."""

    def open(self) -> None:
        """Listen, and accept connections from now on."""
        self._listening.listen(4096)
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def close(self, *, stop_watching: bool) -> None:
        """Close all sockets; `stop_watching`: unregister them first. A fork must not: the selector is its parent's."""
        for each_socket in (self._listening, *(c for _, c in self._silent), *(c for _, _, c in self._waiting)):
            if stop_watching:
                self._unwatch(each_socket)
            each_socket.close()
        self._silent.clear()
        self._waiting.clear()
        self._looked.clear()

    def due_in(self) -> float:
        """Seconds until `tick` has something to do."""
        if self._looked or self._waiting:
            return AGAIN_SECONDS
        if self._accept_at:
            return PAUSE_SECONDS
        return SILENT_SECONDS

    def tick(self) -> None:
        """Hand over the connections that are due."""
        now = time.monotonic()
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        for connection in list(self._looked):
            self._look(connection)
        while self._silent and (self._silent[0][0] < now - SILENT_SECONDS or len(self._silent) > self._most):
            self._send(-1, self._silent[0][1])
        for _ in range(len(self._waiting)):
            since, number, connection = self._waiting.popleft()
            if self._hand(number, connection) or since < now - WAITING_SECONDS or len(self._waiting) > self._most:
                connection.close()
            else:
                self._waiting.append((since, number, connection))

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                log.warning("not_accepted", reason=error.strerror)
                self._unwatch(self._listening)
                self._accept_at = time.monotonic() + PAUSE_SECONDS
                return
            connection.setblocking(False)
            self._silent.append((time.monotonic(), connection))
            self._selector.register(connection, selectors.EVENT_READ, partial(self._look, connection))
            self._look(connection)

    def _look(self, connection: socket.socket) -> None:
        """Hand a connection over as soon as its first bytes tell for which worker."""
        try:
            first = connection.recv(PEEKED, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            self._forget(connection)
            connection.close()
            return
        number = worker_of(first)
        if number is not None:
            self._send(number, connection)
        elif connection not in self._looked:
            # Unread bytes keep the socket ready: the selector would report it in every turn.
            self._unwatch(connection)
            self._looked.add(connection)

    def _send(self, number: int, connection: socket.socket) -> None:
        self._forget(connection)
        if self._hand(number, connection):
            connection.close()  # the worker has it
        else:
            self._waiting.append((time.monotonic(), number, connection))

    def _forget(self, connection: socket.socket) -> None:
        """Stop watching a connection, and remove it from the silent ones."""
        self._unwatch(connection)
        self._looked.discard(connection)
        for index, (_, silent) in enumerate(self._silent):
            if silent is connection:
                del self._silent[index]
                return

    def _unwatch(self, watched: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(watched)
