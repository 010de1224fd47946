"""The server without HTTP: one storage, the roles it plays, and the task that acts on what comes due."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from notify.check.schedule import CheckSchedule
from notify.errors import Unavailable, WrongRole
from notify.runtime import faults
from notify.runtime.clock import Clock, SteadyClock, steady_clock
from notify.runtime.log_output import LogRate
from notify.server.core.bridges import Bridges
from notify.server.core.check_log import CheckLog
from notify.server.core.checks import Checks
from notify.server.core.flow import Flow, RateLimits
from notify.server.core.objectives import Objectives
from notify.server.core.outcomes import Outcomes
from notify.server.core.reports import LeftBehindReports, RefusedReports
from notify.server.core.subscriptions import Subscriptions
from notify.server.core.transactions import Transactions
from notify.server.delivery import Delivery
from notify.server.latency import Latencies
from notify.server.metrics import Metrics
from notify.server.rate import ShareOfTime
from notify.server.settings import Settings
from notify.server.topics import Topics
from notify.storage.capabilities import Retaining, Tended
from notify.storage.queues import Store, queues_of
from notify.storage.transactions import TransactionStore


@dataclass(frozen=True, slots=True)
class QueueRole:
    """The queues of a storage, and the parts of the server that work on them."""

    queues: Store
    delivery: Delivery
    bridges: Bridges
    subscriptions: Subscriptions


def queue_role_of(
    store: TransactionStore, clock: Clock, metrics: Metrics, topics: Topics, with_spans: bool
) -> QueueRole | None:
    """The queue role of a storage; None if it has no queues. `with_spans`: see Bridges."""
    queues = queues_of(store)
    if queues is None:
        return None
    delivery = Delivery(queues, clock, metrics, topics)
    return QueueRole(
        queues, delivery, Bridges(queues, clock, topics, with_spans), Subscriptions(queues, delivery, clock)
    )


log = structlog.get_logger("notify.server")

LONGEST_SLEEP_SECONDS = 0.25
POSTPONED_SECONDS = 0.05
"""The pause after a step that failed."""
LOOK_US = 500_000
SEARCH_SHARE = 0.15
"""The share of the time that all searches of administrators together may use."""
AWAY_US = 2_000_000
"""If the clock ran this much further between two looks than the timer did, the process was stopped meanwhile."""
RETAIN_EVERY_US = 30_000_000
NO_QUEUES = (
    "this server plays only the transactions role: a bridge or a relay moves its messages to a queue server; ask that "
    "one (`notify node list` shows it)"
)
QUEUES_OF_KAFKA = (
    "this server's queues are Kafka's: it shows groups, their lag and dead letters, and pauses, resets and redrives; "
    "docs/kafka.md lists what there is over Kafka"
)


class Core:
    """Transactions and checks, and delivery if the storage has queues. `run` must be running while it is used."""

    _looking: asyncio.TimerHandle | None = None
    _looked_us = 0

    def __init__(
        self,
        store: TransactionStore,
        settings: Settings,
        clock: Clock = steady_clock,
        jitter: random.Random | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics(latencies=Latencies(with_exemplars=settings.tracing))
        schedule = _schedule(settings)
        self._tended = store if isinstance(store, Tended) else None
        self.topics = Topics(store, on_first_use=settings.create_topics)
        role = queue_role_of(store, clock, self.metrics, self.topics, settings.tracing) if not settings.kafka else None
        self._queue_role = role
        self.flow = Flow(store, None if role is None else role.delivery, clock, self.metrics)
        self.topics.listen(self.flow.changed)
        check_log = CheckLog()
        self.transactions = Transactions(
            store,
            clock,
            self.topics,
            shard=settings.shard,
            metrics=self.metrics,
            flow=self.flow,
            with_spans=settings.tracing,
            key_shards=settings.key_shards,
            over_kafka=bool(settings.kafka),
        )
        self.outcomes = Outcomes(
            store,
            clock,
            shard=settings.shard,
            schedule=schedule,
            metrics=self.metrics,
            check_log=check_log,
            jitter=jitter,
        )
        self.checks = Checks(store, clock, schedule, settings.shard, self.metrics, check_log, settings.tracing)
        self.refusals = RefusedReports(clock)
        self.left_behind = LeftBehindReports(clock)
        self.objectives = Objectives(self.metrics.latencies["commit_to_ack"], clock)
        self.searches = ShareOfTime(SEARCH_SHARE)
        """The turns of all searches of administrators: their time is bounded for all of them together."""
        self._retaining: asyncio.Task[None] | None = None
        self._retained_us = clock()
        self.retention_failed = ""
        """Why the last run of retention failed; "" if it did not."""
        self.ticked_us = clock()
        """When all steps last ran without a fault: health is progress."""
        self._steps: tuple[Callable[[], Awaitable[None]], ...] = (
            self._drop_oldest,
            self._deliver,
            self._ask,
            self._retain_now_and_then,
        )
        """The steps of each turn of `run`. One that fails does not hold up the others."""
        self.faults = 0
        """How often a step has failed unexpectedly since the start."""
        self._postponed = LogRate(1)
        self._callers: list[asyncio.Future[None]] = []
        self._sleeping: asyncio.Future[None] | None = None

    def configure(self, settings: Settings, limits: RateLimits) -> None:
        """Apply other settings and rates from now on."""
        self.settings = settings
        self.outcomes.schedule = self.checks.schedule = _schedule(settings)
        self.topics.on_first_use = settings.create_topics
        if isinstance(self.store, Retaining):
            self.store.keep(round(settings.retention_seconds * 1_000_000), settings.retention_bytes)
        if limits != self.flow.limits:
            self.flow.set_limits(limits)

    def _as_queue(self) -> QueueRole:
        if self._queue_role is None:
            raise WrongRole(QUEUES_OF_KAFKA if self.settings.kafka else NO_QUEUES)
        return self._queue_role

    @property
    def queues(self) -> Store:
        """The storage in its queue role. Raises WrongRole if this server has no queues."""
        return self._as_queue().queues

    @property
    def delivery(self) -> Delivery:
        """Raises WrongRole if this server has no queues."""
        return self._as_queue().delivery

    @property
    def subscriptions(self) -> Subscriptions:
        """Raises WrongRole if this server has no queues."""
        return self._as_queue().subscriptions

    @property
    def bridges(self) -> Bridges:
        """Raises WrongRole if this server has no queues."""
        return self._as_queue().bridges

    @property
    def has_queues(self) -> bool:
        """Whether this server plays the queue role."""
        return self._queue_role is not None

    async def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions. Raises NotFound, WrongRole."""
        self.delivery.following.delete_topic_soon(name)
        self.flow.deleted(name)  # before the wait: meanwhile backlogs are trimmed, and the topic may be made again
        await self.queues.sync()

    async def run(self) -> None:
        """Act on leases, retries, delays and checks as they come due, until cancelled."""
        self._looked_us = self.clock()
        if isinstance(self.clock, SteadyClock):  # a test's clock jumps on purpose, so that leases end
            self._look_now_and_then()
        try:
            await self._act_as_time_passes()
        finally:
            if self._looking is not None:
                self._looking.cancel()

    async def _act_as_time_passes(self) -> None:
        while True:
            if self._looking is not None:
                self._look()
            callers, self._callers = self._callers, []
            failed = False
            for step in self._steps:
                try:
                    await step()
                except Unavailable as error:
                    # For example, the disk is full: this step is tried again, and the others continue.
                    if self._postponed.may():
                        log.warning("postponed", step=step.__name__, reason=str(error))
                    await asyncio.sleep(POSTPONED_SECONDS)
                except Exception:
                    # A fault of the server itself. The other steps continue; if the fault stays, `/livez` answers 503.
                    failed = True
                    self.faults += 1
                    faults.unexpected("step_failed", step=step.__name__)
                    await asyncio.sleep(POSTPONED_SECONDS)
            if not failed:
                self.ticked_us = self.clock()
            if self._queue_role is not None and self._queue_role.delivery.is_releasing:
                self._callers = callers + self._callers
            else:
                _wake(*callers)
            await self._sleep()

    async def _drop_oldest(self) -> None:
        self.flow.drop_oldest()

    async def _deliver(self) -> None:
        if self._queue_role is not None:
            await self._queue_role.delivery.tick()

    async def _ask(self) -> None:
        await self.checks.tick()
        if self._tended is not None:
            self._tended.tend(self.clock())

    async def act(self) -> None:
        """Act now on what is due, and return when that is done: for a test that moves its clock."""
        done = asyncio.get_running_loop().create_future()
        self._callers.append(done)
        if self._sleeping is not None:
            _wake(self._sleeping)
        await done

    async def _retain_now_and_then(self) -> None:
        """Start retention, which runs concurrently with the steps; if it fails (the disk may be full), it is tried
        again later."""
        now_us = self.clock()
        store = self.store
        if now_us - self._retained_us < RETAIN_EVERY_US or not isinstance(store, Retaining):
            return
        self._retained_us = now_us
        if self._retaining is None or self._retaining.done():
            self._retaining = asyncio.get_running_loop().create_task(self._retain(store, now_us))

    async def _retain(self, store: Retaining, now_us: int) -> None:
        try:
            await store.retain(now_us)
        except Exception as error:
            self.retention_failed = str(error)[:300] or type(error).__name__
            faults.note("retention_failed", error)
        else:
            self.retention_failed = ""

    async def stop(self) -> None:
        """Wait for a retention that runs."""
        if self._retaining is not None:
            await asyncio.wait([self._retaining])

    def _look_now_and_then(self) -> None:
        """Look by a timer: after a stop of the process a timer runs before any task acts on the time."""
        self._look()
        self._looking = asyncio.get_running_loop().call_later(LOOK_US / 1e6, self._look_now_and_then)

    def _look(self) -> None:
        """Notice that this process was stopped or its clock set, and extend all leases: nobody could renew them."""
        now_us = self.clock()
        away_us, self._looked_us = now_us - self._looked_us - LOOK_US, now_us
        if abs(away_us) < AWAY_US:
            return
        if away_us > 0:
            log.warning("was_away", seconds=round(away_us / 1e6, 1), detail="all leases are extended by this time")
        else:
            self._retained_us = min(self._retained_us, now_us)
            remedy = "restart this server to run overdue checks now; retries and delays wait until the clock catches up"
            log.error("clock_set_back", seconds=round(-away_us / 1e6, 1), remedy=remedy)
        if self._queue_role is not None:
            self._queue_role.delivery.extend_leases(away_us)

    async def _sleep(self) -> None:
        event_times = [self.checks.next_event_us()]
        if self._queue_role is not None:
            event_times.append(self._queue_role.delivery.next_event_us())
        due_us = min((event_us for event_us in event_times if event_us is not None), default=None)
        seconds = LONGEST_SLEEP_SECONDS
        if due_us is not None:
            seconds = min(seconds, max(0.001, (due_us - self.clock()) / 1_000_000))
        if self._callers:
            return
        loop = asyncio.get_running_loop()
        self._sleeping = loop.create_future()
        timer = loop.call_later(seconds, _wake, self._sleeping)
        try:
            await self._sleeping
        finally:
            timer.cancel()
            self._sleeping = None


def _wake(*waiting: asyncio.Future[None]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _schedule(settings: Settings) -> CheckSchedule:
    return CheckSchedule(
        settings.check_attempts,
        settings.check_backoff_seconds,
        settings.check_backoff_max_seconds,
        settings.check_answer_seconds,
        settings.check_parked_seconds,
    )
