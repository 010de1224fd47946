"""The record of what runs: made when a server has started (notify/server/start.py), taken away when it stops.

Routers take a callable that gives it, or raises Unavailable while there is none: none of them knows the application,
and none has to ask which part of it is there already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notify.server.cluster.workers import Workers
from notify.server.configuration.follow import Administration
from notify.server.core.core import Core
from notify.server.core.pushes import Pushes
from notify.server.data.routes import DataRoutes
from notify.server.groups import QueueEngine
from notify.server.jobs.runner import Jobs
from notify.server.shipping import Shipping
from notify.server.watch.alarms import Alarms
from notify.server.watch.figures import Figures
from notify.server.watch.history import History
from notify.server.watch.silences import Silences


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a server that has started. Methods of all of them belong to the event loop."""

    core: Core
    administration: Administration
    """The settings that hold, who may come in, and the records of both."""
    members: Callable[[], dict[str, Any]]
    """Gives the answer of `GET /v1/members`."""
    history: History
    figures: Figures
    alarms: Alarms
    silences: Silences
    jobs: Jobs
    data: DataRoutes
    queues: QueueEngine
    """Groups, dead letters and topics as administrators see them."""
    pushes: Pushes
    shipping: Shipping | None = None
    """Ships the log to an object store; None where that is not set."""
    workers: Workers | None = None
    """The workers that this is one of; None where it is the only one."""
