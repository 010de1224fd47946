"""The server without HTTP: one storage, the two roles over it, and the task that acts when time passes."""

from __future__ import annotations

import asyncio
import random

from notify.check.schedule import CheckSchedule
from notify.errors import Unavailable
from notify.server.checks import Checks
from notify.server.clock import Clock, wall_clock
from notify.server.delivery import Delivery
from notify.server.metrics import Metrics
from notify.server.transactions import Transactions
from notify.settings import Settings
from storage.store import Store

LONGEST_SLEEP_SECONDS = 0.25


class Core:
    """Transactions, checks and delivery. `run` must be a task while it is used."""

    def __init__(
        self, store: Store, settings: Settings, clock: Clock = wall_clock, jitter: random.Random | None = None
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        schedule = CheckSchedule(
            settings.check_attempts,
            settings.check_backoff_seconds,
            settings.check_backoff_max_seconds,
            settings.check_answer_seconds,
            settings.check_parked_seconds,
        )
        self.transactions = Transactions(
            store,
            clock,
            shard=settings.shard,
            create_topics=settings.create_topics,
            schedule=schedule,
            jitter=jitter,
            metrics=self.metrics,
        )
        self.checks = Checks(store, clock, schedule, settings.shard, self.metrics)
        self.delivery = Delivery(store, clock, self.metrics)
        self.ticked_us = clock()
        """When time was last acted upon: health is progress."""

    async def run(self) -> None:
        """Act on leases, retries, delays and checks as they come due, until cancelled."""
        while True:
            try:
                await self.delivery.tick()
                self.checks.tick()
                self.store.ripen_checks(self.clock())
            except Unavailable:
                # No room on the disk: what is due waits, and is tried again.
                await asyncio.sleep(LONGEST_SLEEP_SECONDS)
            self.ticked_us = self.clock()
            await self._sleep()

    async def _sleep(self) -> None:
        times = [self.delivery.next_event_us(), self.checks.next_event_us()]
        due_us = min((t for t in times if t is not None), default=None)
        seconds = LONGEST_SLEEP_SECONDS
        if due_us is not None:
            seconds = min(seconds, max(0.001, (due_us - self.clock()) / 1_000_000))
        await asyncio.sleep(seconds)
