"""A TLS connection's transport that knows how much its client has not read.

An event loop encrypts what is written to TLS immediately, and hands it to the connection below, where it no longer
counts: an answer of any size seems to be read, and the server would not notice a client that does not read.
"""

from __future__ import annotations

import asyncio
from typing import Any

MOST_BYTES = 64 << 10
"""Writing pauses above this many unread bytes, as it does without TLS."""
FEW_BYTES = 16 << 10
"""Writing resumes at this many unread bytes or fewer."""
LOOK_SECONDS = 0.05
"""How often the number of unread bytes is polled while writing pauses: the loop reports no change."""


class SecuredTransport:
    """Writes to `secured`, a TLS transport over `below`, and pauses the protocol's writing until the client reads."""

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
