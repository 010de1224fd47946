"""Takes connections that the parent process has accepted and hands over a socket (SCM_RIGHTS)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from notify.runtime import faults

AT_ONCE = 64


class Handed:
    """Takes connections from a socket as they come. Belongs to one event loop."""

    def __init__(self, channel: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` makes the protocol of a connection."""
        self._channel = channel
        self._make = make
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take connections from now on."""
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take)

    def stop(self) -> None:
        """Take no more connections; connections still in the socket are cut when this process ends."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            if not data:
                self.stop()  # the parent is gone
                return
            for descriptor in descriptors:
                task = asyncio.get_running_loop().create_task(self._begin(socket.socket(fileno=descriptor)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection)
        except OSError:
            connection.close()  # its client has gone
        except Exception:
            faults.unexpected("connection_not_taken")
            with contextlib.suppress(OSError):
                connection.close()
