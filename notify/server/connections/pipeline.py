"""Pipelined requests: requests of one connection that wait until earlier ones are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from notify.server.access.principal import NOBODY
from notify.server.connections.cycle import DataCycle

PIPELINED = 64
"""The most pipelined requests of a connection. If more come, the connection ends after these: the client sends the
others again, as HTTP requires."""
PACE_SECONDS = 0.02
"""The pause between two pipelined requests of unverified senders, or to other routes than data routes: they cost the
server many times what they cost the sender, and no browser or tool pipelines them."""


class Pipeline(list[Any]):
    """Cycles that wait, the next one last. Uvicorn keeps them in a deque, which takes 760 bytes when it is empty."""

    __slots__ = ()

    def appendleft(self, waiting: Any) -> None:
        """Add a cycle after all others."""
        self.insert(0, waiting)


class PipelineFlow:
    """Flow control that reads nothing while requests of the connection wait for their turn, or a body for its room.

    It takes the place of uvicorn's `FlowControl`, which has an event (with another deque) for each connection.
    """

    __slots__ = ("_is_writable", "_pipeline", "_transport", "read_paused", "waits_for_room", "write_paused")

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        self._transport = transport
        self._pipeline = pipeline
        self.read_paused = self.write_paused = self.waits_for_room = False
        self._is_writable: asyncio.Event | None = None

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        if self.write_paused:
            if self._is_writable is None:
                self._is_writable = asyncio.Event()
            await self._is_writable.wait()

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless requests or a body wait."""
        if self.read_paused and not self._pipeline and not self.waits_for_room:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than is written."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Note that the client has read enough, and let `drain` return."""
        self.write_paused = False
        if self._is_writable is not None:
            self._is_writable.set()
            self._is_writable = None


def is_known(cycle: Any) -> bool:
    """Whether a request is for a data route, and its sender is admitted."""
    return type(cycle) is DataCycle and cycle.request.principal is not NOBODY
