"""TLS connections: the handshake, which has a place among the connections and a bounded time, and the transport."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Generator
from typing import Any

from notify.runtime import faults
from notify.server.connections.protocol import Protocol
from notify.server.connections.quota import Place

HANDSHAKE_SECONDS = 10.0
MOST_BYTES = 64 << 10
"""Writing pauses above this many unread bytes, as it does without TLS."""
FEW_BYTES = 16 << 10
"""Writing resumes at this many unread bytes or fewer."""
LOOK_SECONDS = 0.05
"""How often the number of unread bytes is polled while writing pauses: the loop reports no change."""


class _Begun:
    """A coroutine whose first step runs immediately; a task awaits the rest."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._awaited = coroutine.send(None)

    def __await__(self) -> Generator[Any, Any, Any]:
        awaited = self._awaited
        while True:
            try:
                try:
                    sent = yield awaited
                except BaseException as error:
                    awaited = self._coroutine.throw(error)
                else:
                    awaited = self._coroutine.send(sent)
            except StopIteration as end:
                return end.value


class Handshake(asyncio.Protocol):
    """Holds a connection until its handshake is complete, and then hands it to a Protocol.

    An event loop that had the certificate itself would report a connection only after its handshake. Clients that begin
    no handshake could then take all open files without being counted.
    """

    def __init__(self, context: ssl.SSLContext, **uvicorn_arguments: Any) -> None:
        """`context`: the server's certificate; the other arguments are uvicorn's to each connection."""
        self._context = context
        self._protocol = Protocol(**uvicorn_arguments)
        self._connections = self._protocol.app.connections
        self._open = self._protocol.server_state.connections
        self._loop = self._protocol.loop
        self._tasks = self._protocol.server_state.tasks
        self._transport: Any = None
        self._early: list[bytes] = []
        """Data that came together with the end of the handshake."""
        self._has_ended = False
        """The client closed its sending direction together with the end of the handshake."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._connections.admit(self, self._loop.time()) is Place.NONE:
            transport.abort()  # no reason can be sent before the handshake
            return
        self._open.add(self)  # type: ignore[arg-type]
        secured = self._loop.start_tls(
            transport, self, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        # Begun now: until a task's first turn data would be passed to this class, and be lost to the handshake.
        task = self._loop.create_task(self._shake_hands(transport, _Begun(secured)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, transport: Any, handshake: _Begun) -> None:
        try:
            secured = await handshake
        except OSError:  # includes ssl.SSLError and TimeoutError: the client's fault, or it has gone
            transport.abort()
            return
        except Exception:
            faults.unexpected("handshake_failed")
            transport.abort()
            return
        finally:
            self._open.discard(self)
            self._connections.discard(self)
        if transport.is_closing():
            return  # the event loop reports a cut connection like a complete handshake
        # Without an `await` in between no other connection can take the place: the Protocol gets it.
        secured.set_protocol(self._protocol)
        self._protocol.connection_made(SecuredTransport(secured, transport, self._loop))
        for data in self._early:
            self._protocol.data_received(data)
        if self._has_ended:
            self._protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def eof_received(self) -> None:
        self._has_ended = True

    # --- what Connections, and uvicorn at its stop, call ----------------------------------------------------------

    def idle_since(self) -> float | None:
        """None: a handshake is never idle."""
        return None

    def turn_away(self) -> None:
        """End the connection without a reason: none can be sent before the handshake is complete."""
        self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """End the connection, because the server stops."""
        self.abort()


class SecuredTransport:
    """Writes to `secured`, a TLS transport over `below`, and pauses the protocol's writing until the client reads.

    An event loop encrypts what is written to TLS immediately, and hands it to the connection below, where it no longer
    counts: an answer of any size seems to be read, and the server would not notice a client that does not read.
    """

    def __init__(self, secured: Any, below: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        secured.set_write_buffer_limits(high=1 << 30)  # this class pauses writing instead
        self._secured = secured
        self._below = below
        self._loop = loop
        self._protocol: Any = secured.get_protocol()
        self._is_paused = False
        self.is_closing = secured.is_closing  # called for each answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secured, name)

    def get_write_buffer_size(self) -> int:
        size: int = self._secured.get_write_buffer_size()
        return size + self._below.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        self._secured.write(data)
        if not self._is_paused and not self.is_closing() and self.get_write_buffer_size() > MOST_BYTES:
            self._is_paused = True
            self._protocol.pause_writing()
            self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.is_closing():
            return
        if self.get_write_buffer_size() > FEW_BYTES:
            self._loop.call_later(LOOK_SECONDS, self._look)
            return
        self._is_paused = False
        self._protocol.resume_writing()
