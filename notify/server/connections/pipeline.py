"""Pipelined requests: requests of one connection that wait until earlier ones are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from notify.server.access.principal import NOBODY
from notify.server.connections.cycle import DataCycle

PIPELINED = 64
"""The most pipelined requests of a connection. If more come, the connection ends after these: the client sends the
others again, as HTTP requires."""
PACE_SECONDS = 0.02
"""The pause between two pipelined requests of unverified senders, or to other routes than data routes: they cost the
server many times what they cost the sender, and no browser or tool pipelines them."""


class PipelineFlow(FlowControl):
    """Flow control that reads nothing while requests of the connection wait for their turn, or a body for its room."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline
        self.waits_for_room = False

    def resume_reading(self) -> None:
        if self.read_paused and not self._pipeline and not self.waits_for_room:
            super().resume_reading()


def is_known(cycle: Any) -> bool:
    """Whether a request is for a data route, and its sender is admitted."""
    return type(cycle) is DataCycle and cycle.request.principal is not NOBODY
