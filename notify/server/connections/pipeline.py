"""The requests of one connection that wait for the answers before theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from notify.server.access.principal import NOBODY
from notify.server.connections.cycle import DataCycle

PIPELINED = 64
"""Requests of one connection that wait for the answers before theirs. Where more come, the connection ends behind
these: their client sends the others again, as HTTP asks of it."""
PACE_SECONDS = 0.02
"""The server waits so long between two pipelined requests of strangers, or to other than data routes: they cost the
server many times what they cost their sender, and no browser or tool pipelines them."""


class PipelineFlow(FlowControl):
    """Nothing is read while requests of the connection wait for their turn, whoever asks for more."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if self.read_paused and not self._pipeline:
            super().resume_reading()


def is_known(cycle: Any) -> bool:
    """Whether a request goes to a data route, from someone who is let in."""
    return type(cycle) is DataCycle and cycle.request.principal is not NOBODY
