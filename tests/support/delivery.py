"""A delivery over memory, for tests of what groups receive and when: without a server, on a clock that tests move."""

from __future__ import annotations

from notify.server.core.subscriptions import Subscriptions
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.topics import Topics
from notify.storage.memory import MemoryStore

T0 = 1_800_000_000_000_000
SECOND = 1_000_000


class Scene:
    """A delivery and its clock, `now_us`, which a test moves."""

    def __init__(self, *, on_first_use: bool = True) -> None:
        self.now_us = T0
        self.store = MemoryStore(lambda: self.now_us)
        self._on_first_use = on_first_use
        self.restart()

    def restart(self) -> None:
        """Start a new delivery over the same storage, as a restart of the server does."""
        self.topics = Topics(self.store, on_first_use=self._on_first_use)
        self.metrics = Metrics()
        self.delivery = Delivery(self.store, lambda: self.now_us, self.metrics, self.topics)
        self.subscriptions = Subscriptions(self.store, self.delivery, lambda: self.now_us)
