"""The record of a server's running parts: notify/server/start.py makes it after the start, and drops it at the stop.

Routers take a callable that returns it, or raises Unavailable while the server does not run. So no router knows the
application, or has to ask which of its parts have started.
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
from notify.server.schedules.schedules import Schedules
from notify.server.shipping import Shipping
from notify.server.watch.alarms import Alarms
from notify.server.watch.figures import Figures
from notify.server.watch.history import History
from notify.server.watch.silences import Silences


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a server that has started. Call their methods on the event loop only."""

    core: Core
    administration: Administration
    """The settings that hold, access control, and the records of both."""
    members: Callable[[], dict[str, Any]]
    """Returns the answer of `GET /v1/members`."""
    history: History
    figures: Figures
    alarms: Alarms
    silences: Silences
    jobs: Jobs
    data: DataRoutes
    queues: QueueEngine
    """The groups, dead letters and topics that administrators see."""
    pushes: Pushes
    schedules: Schedules
    shipping: Shipping | None = None
    """Ships the log to an object store; None if `ship_to` is not set."""
    workers: Workers | None = None
    """All workers of this machine, of which this server is one; None if it is alone."""
