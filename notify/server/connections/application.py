"""The part of the application that connections use."""

from __future__ import annotations

from typing import Protocol

from notify.server.access.guard import Door
from notify.server.connections.held import Budget
from notify.server.connections.quota import Connections
from notify.server.connections.turns import Turns
from notify.server.data.answer import Answer
from notify.server.data.request import Request


class DataAnswers(Protocol):
    """Answers requests to data routes."""

    async def answer(self, request: Request) -> Answer:
        """The answer, errors included."""


class Application(Door, Protocol):
    """The application whose requests a connection reads."""

    connections: Connections
    budget: Budget
    strangers: Turns
    operators: Turns

    @property
    def data(self) -> DataAnswers:
        """Answers requests to data routes now; it changes when the server starts and stops."""

    async def open_answer(self, request: Request) -> Answer:
        """The answer to a request that anyone may send: a probe of health, the page to sign in, the console's files."""
