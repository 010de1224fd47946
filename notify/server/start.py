"""Starts a server's parts, each after the parts that it needs, and stops them in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Engine

from notify.errors import InvalidRequest
from notify.runtime import faults
from notify.runtime.clock import Clock, SteadyClock, steady_clock
from notify.runtime.databases import reason_of
from notify.runtime.threads import in_thread
from notify.runtime.urls import without_secrets
from notify.server.cluster.work import CoreWork
from notify.server.cluster.workers import Workers
from notify.server.configuration.follow import Administration
from notify.server.configuration.last_known import LastKnown
from notify.server.configuration.records import Records
from notify.server.configuration.revisions import Configuration
from notify.server.core.check_webhooks import CheckWebhooks
from notify.server.core.core import AWAY_US, Core
from notify.server.core.pushes import Pushes
from notify.server.data.encode import json_check, json_deliveries
from notify.server.data.routes import DataRoutes
from notify.server.database import open_database
from notify.server.groups import QueueEngine
from notify.server.groups.own import own_engine
from notify.server.jobs.records import JobRecords
from notify.server.jobs.runner import Jobs
from notify.server.running import Running
from notify.server.schedules.place import Place
from notify.server.schedules.records import ScheduleRecords
from notify.server.schedules.schedules import Schedules
from notify.server.settings import Settings
from notify.server.shipping import Shipping
from notify.server.tasks import ended
from notify.server.watch.alarms import Alarms
from notify.server.watch.chart_file import ChartFile
from notify.server.watch.figures import Figures
from notify.server.watch.history import History
from notify.server.watch.silences import Silences
from notify.storage.capabilities import Dated, Shippable, shard_names
from notify.storage.members import Member
from notify.storage.queues import queues_of
from notify.storage.transactions import TransactionStore

if TYPE_CHECKING:
    from notify.kafka.cluster import Cluster
    from notify.server.cluster.membership import Membership

log = structlog.get_logger("notify.server")

Row = TypeVar("Row")


@contextlib.asynccontextmanager
async def started(
    settings: Settings,
    url: str,
    open_store: Callable[[], TransactionStore],
    clock: Clock,
    reply_bytes: Callable[[int], int],
    workers: Workers | None = None,
) -> AsyncIterator[Running]:
    """Recover the storage and start all parts; leaving the context makes everything durable and stops them.

    `url`: the address to announce; `clock`: the time unless a registry's database gives it; `reply_bytes` returns how
    large a reply may be now; `workers`: all workers of the machine, if this is one of several. Raises StorageFailed,
    Corrupt, or InvalidRequest if the registry is not one, after it has stopped the parts that had started.
    """
    async with contextlib.AsyncExitStack() as parts:
        store = open_store()
        await store.open(steady_clock())
        parts.push_async_callback(store.close)
        database = open_database(settings.data_dir)
        parts.callback(database.dispose)
        membership = await in_thread(_membership, settings, url, store)
        clock = await _clock_of(membership, store, clock)
        shipping = await parts.enter_async_context(_shipping(settings, store))
        core = Core(store, settings, clock)
        parts.push_async_callback(core.stop)
        webhooks = CheckWebhooks(core, json_check)
        parts.push_async_callback(webhooks.stop)
        pushes = Pushes(core, json_deliveries)
        parts.push_async_callback(pushes.stop)

        def follow(configuration: Configuration) -> None:
            core.configure(configuration.settings, configuration.limits)
            webhooks.follow(configuration.check_webhooks)
            pushes.follow(configuration.pushes)
            core.objectives.follow(configuration.objectives)

        engine = database if membership is None else membership.engine
        if workers is not None:
            engine = await parts.enter_async_context(_shared(workers))
        schedules = Schedules(core, ScheduleRecords(engine), _place(settings, membership), Records(engine).record)
        parts.push_async_callback(schedules.stop)
        last_known = None if membership is None else LastKnown(Path(settings.data_dir))
        administration = Administration(settings, engine, clock, follow, last_known, schedules.follow)
        parts.push_async_callback(administration.stop)
        await administration.start(settings.data_dir)

        queues = await parts.enter_async_context(_queues(settings, core))
        watching = _watching(core, queues, administration.records, database, shipping, pushes, workers, schedules)
        watched = await parts.enter_async_context(watching)
        run = asyncio.get_running_loop().create_task(core.run())
        parts.push_async_callback(ended, run)
        schedules.start()
        jobs = Jobs(JobRecords(database), core, queues.letters, clock)
        parts.push_async_callback(jobs.stop)
        await jobs.resume()
        members = _members(core, url, membership, workers)
        if membership is not None:
            # It starts last, and so stops first: others no longer send here when the other parts stop.
            parts.push_async_callback(membership.stop)
            await membership.announce(CoreWork(core))
        data = DataRoutes(core, members, reply_bytes, schedules)
        yield Running(core, administration, members, *watched, jobs, data, queues, pushes, schedules, shipping, workers)


async def _clock_of(membership: Membership | None, store: TransactionStore, clock: Clock) -> Clock:
    """The clock of the registry, which is then known; without one, `clock`, which continues from the time of the log.

    The process before may have been ahead, as where a machine starts with a wrong time: the checks, retries and delays
    that it recorded would otherwise wait until that time comes.
    """
    if membership is not None:
        await membership.start()
        return membership.clock
    if isinstance(store, Dated) and isinstance(clock, SteadyClock):
        ahead_us = store.written_us - clock()
        clock.go_on_from(store.written_us)
        if ahead_us > AWAY_US:
            what = "time runs at half speed" if clock() >= store.written_us else "checks, retries and delays wait"
            detail = f"the log was written by a clock that was ahead: {what} until this clock has caught up"
            log.warning("log_is_ahead", seconds=round(ahead_us / 1e6, 1), detail=detail)
    return clock


@contextlib.asynccontextmanager
async def _shared(workers: Workers) -> AsyncIterator[Engine]:
    """The database of settings and credentials, which all workers share."""
    engine = open_database(str(workers.directory))
    try:
        yield engine
    finally:
        await workers.stop()
        engine.dispose()


@contextlib.asynccontextmanager
async def _watching(
    core: Core,
    queues: QueueEngine,
    records: Records,
    database: Engine,
    shipping: Shipping | None,
    pushes: Pushes,
    workers: Workers | None,
    schedules: Schedules,
) -> AsyncIterator[tuple[History, Figures, Alarms, Silences]]:
    """Gather the server's figures and raise alarms while the context lasts."""
    silences = Silences(database)
    await silences.load()
    history, figures = History(core, queues.groups.lag), Figures(queues.counted, core.clock, core.metrics.latencies)
    restarted_for = "" if workers is None else workers.ended.reason
    read = _last_read(records.audits, 1), _last_read(records.credentials)
    alarms = Alarms(core, *read, queues.groups, silences, shipping, pushes, restarted_for, schedules)
    charts = ChartFile(Path(core.settings.data_dir), history, figures)
    await charts.load()
    async with contextlib.AsyncExitStack() as parts:
        for part in (history, figures, alarms, charts):
            part.start()
            parts.push_async_callback(part.stop)
        yield history, figures, alarms, silences


@contextlib.asynccontextmanager
async def _queues(settings: Settings, core: Core) -> AsyncIterator[QueueEngine]:
    """The queues that administrators see.

    Raises InvalidRequest if Kafka's client refuses the URL or the settings, or is not installed.
    """
    if not settings.kafka:
        yield own_engine(core)
        return
    cluster = cluster_of(settings)
    from notify.server.groups.kafka.engine import kafka_engine

    async with kafka_engine(cluster, core.refusals) as queues:
        yield queues


def cluster_of(settings: Settings) -> Cluster:
    """The Kafka cluster of the settings. Raises InvalidRequest if the URL is bad or Kafka's client is missing."""
    try:
        from notify.kafka.cluster import Cluster
    except ImportError as error:
        raise InvalidRequest(f"setting kafka needs the extra kafka: pip install 'notify-tx[kafka]' ({error})") from None
    return Cluster.of(settings.kafka)


@contextlib.asynccontextmanager
async def _shipping(settings: Settings, store: TransactionStore) -> AsyncIterator[Shipping | None]:
    """Ship this server's log while the context lasts; None if `ship_to` is not set.

    Raises InvalidRequest if this server has no log, and what `Shipping.start` raises.
    """
    if not settings.ship_to:
        yield None
        return
    if not isinstance(store, Shippable):
        raise InvalidRequest(
            "setting ship_to ships the server's own log, and this server has none: with a database as storage, set it "
            "at the queue servers"
        )
    if missing := [name for name in ("fsspec", "pyarrow") if importlib.util.find_spec(name) is None]:
        raise InvalidRequest(
            f"setting ship_to needs the extra ship: pip install 'notify-tx[ship]' (missing: {', '.join(missing)})"
        )
    shipping = Shipping(store, settings, steady_clock)
    try:
        await shipping.start()
        yield shipping
    finally:
        await shipping.stop()


def _last_read(read: Callable[..., list[Row]], *arguments: Any) -> Callable[[], Awaitable[list[Row]]]:
    """A function that reads rows, and returns those that it read last while the records' database is unreachable."""
    last_read: list[Row] = []

    async def rows() -> list[Row]:
        try:
            last_read[:] = await in_thread(read, *arguments)
        except faults.DATABASE_AWAY as error:
            faults.note("records_not_read", error)  # the other alarms continue
        return last_read

    return rows


def _membership(settings: Settings, url: str, store: TransactionStore) -> Membership | None:
    """This server's membership in the registry, if it has one. Raises InvalidRequest or StorageFailed if it is bad."""
    queues = queues_of(store)
    if not settings.registry and queues is not None:
        return None  # the imports below need more than the extra `server`
    from notify.server.cluster.membership import Membership
    from notify.storage.sql import schema
    from notify.storage.sql.engines import open_engine
    from notify.storage.sql.shards import SqlShards

    if settings.registry:
        engine = open_engine(settings.registry, named="--registry")
        try:
            schema.verify(engine)
            schema.check_version(engine)
        except faults.DATABASE_AWAY as error:
            faults.note("registry_not_checked", error)
        except sa.exc.DatabaseError as error:  # such as a file that is not a database
            registry = without_secrets(settings.registry)
            raise InvalidRequest(f"--registry {registry}: the database refuses: {reason_of(error)}") from error
    elif isinstance(store, SqlShards):
        store.check_registry()
        engine = store.first.engine
    else:
        return None
    roles = ("transactions",) if queues is None else roles_of(settings)
    name = f"server-{uuid.uuid4().hex[:12]}"
    shards = shard_names(store, settings.shard)
    member = Member(name, "server", url, roles, shards, settings.room)
    return Membership(engine, member, store if isinstance(store, SqlShards) else None)


def roles_of(settings: Settings) -> tuple[str, ...]:
    """The roles that a server with queues announces. Raises InvalidRequest for an unknown role, or if there is none."""
    roles = tuple(role.strip() for role in settings.roles.split(",") if role.strip())
    for role in roles or ("",):
        if role not in ("transactions", "queue"):
            raise InvalidRequest(f"setting roles: {role!r} is neither transactions nor queue")
    return roles if settings.takes_messages else ()


def _place(settings: Settings, membership: Membership | None) -> Place:
    """This server among those that read the same schedules."""
    if membership is None:
        return Place(settings)
    return Place(settings, lambda: membership.members, membership.me, shares_storage=membership.shares_storage)


def _members(
    core: Core, url: str, membership: Membership | None, workers: Workers | None
) -> Callable[[], dict[str, Any]]:
    """A function that returns the answer of `GET /v1/members`."""
    if workers is not None:
        return partial(workers.shown, core.settings, roles_of(core.settings))
    return partial(_alone, core, url) if membership is None else membership.shown


def _alone(core: Core, url: str) -> dict[str, Any]:
    """The members without a registry: this server alone."""
    settings = core.settings
    server = Member("server", "server", url, roles_of(settings), (settings.shard,), settings.room)
    return {"version": 0, "members": [server.shown()]}
