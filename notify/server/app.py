"""The application: it starts and stops the server's parts, and routes each request: data routes to the core, probes to
health, what anyone may see of the console to its cache, everything else to the management application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from notify.errors import NotifyError, Unavailable, WrongRole
from notify.runtime import faults
from notify.runtime.clock import Clock, steady_clock
from notify.server import health
from notify.server.access.gate import Access
from notify.server.access.guard import NOT_RUNNING
from notify.server.cluster.workers import Workers
from notify.server.connections.application import DataAnswers
from notify.server.connections.held import budget_of
from notify.server.connections.quota import Connections
from notify.server.connections.turns import Turns
from notify.server.data.answer import Answer
from notify.server.data.request import PROBES
from notify.server.data.request import Request as DataRequest
from notify.server.data_directory import unusable
from notify.server.running import Running
from notify.server.settings import Settings
from notify.server.start import started
from notify.storage.transactions import TransactionStore

if TYPE_CHECKING:
    from notify.server.management import Management

STRANGERS_SHARE, OPERATORS_SHARE = 0.1, 0.25
"""The least shares of the event loop's time for requests of strangers, and for those of operators (admin routes and the
console), while producers and consumers keep it busy."""
RELOAD_SECONDS = 5
"""The least time between two tries to load the application for operators: anyone may ask for it, at any rate."""
NOT_LOADED = "the server could not load what operators need; its log says why"
SHOWS_ONLY = (
    "this server shows the consumer groups of Kafka, and takes no messages: producers send to a server with a storage, "
    "consumers read kafka://…"
)


def _nothing() -> None:
    pass


class _NotRunning:
    """Answers requests to data routes while the server is starting or stopping."""

    async def answer(self, request: DataRequest) -> Answer:
        return Answer.problem(Unavailable(NOT_RUNNING))


class _ShowsOnly:
    """Answers data routes of a server that takes no messages: it names the members, and refuses the rest."""

    def __init__(self, routes: DataAnswers) -> None:
        self._routes = routes

    async def answer(self, request: DataRequest) -> Answer:
        if request.path == "/v1/members":
            return await self._routes.answer(request)
        return Answer.problem(WrongRole(SHOWS_ONLY))


class App:
    """One server process. Until `start` has recovered the storage, every route except health answers 503."""

    def __init__(
        self,
        settings: Settings,
        open_store: Callable[[], TransactionStore],
        clock: Clock = steady_clock,
        on_start: Callable[[], None] = _nothing,
        on_failure: Callable[[], None] = _nothing,
        workers: Workers | None = None,
    ) -> None:
        """`clock` is used unless there is a registry, whose database then gives the time. `on_start` is called after
        the start, and may raise a NotifyError; `on_failure` is called when the server cannot serve (`failed` says why).
        `workers`: all workers of this machine, if this server is one of several."""
        self._workers = workers
        self._clock = clock
        self._started_with = settings
        self._open_store = open_store
        self._on_start = on_start
        self._on_failure = on_failure
        self.url = settings.url
        """The address to announce."""
        self.budget = budget_of(len(settings.key_shards))
        self.strangers, self.operators = Turns(STRANGERS_SHARE), Turns(OPERATORS_SHARE)
        self.connections = Connections(settings.connections)
        self.failed: NotifyError | None = None
        """Why the server could not start, or could not stop cleanly."""
        self._running: Running | None = None
        self.access: Access | None = None
        """None while the server is starting or stopping: then every request is refused."""
        self.data: DataAnswers = _NotRunning()
        self._parts = contextlib.AsyncExitStack()
        self._management: asyncio.Future[Management] | None = None
        """None until it is needed."""
        self._reload_us = 0
        """When it may be loaded again, if that failed."""

    async def start(self) -> None:
        """Recover the storage and begin to serve. Raises StorageFailed or Corrupt."""
        reply_bytes = self.budget.reply_bytes
        parts = started(self._started_with, self.url, self._open_store, self._clock, reply_bytes, self._workers)
        try:
            self._running = await self._parts.enter_async_context(parts)
        except OSError as error:
            raise unusable(self._started_with.data_dir, error) from error
        self.access = self._running.administration.access
        takes_messages = self._started_with.takes_messages
        self.data = self._running.data if takes_messages else _ShowsOnly(self._running.data)

    async def stop(self) -> None:
        """Make everything durable, and stop all parts."""
        self._running = self.access = None
        self.data = _NotRunning()
        await self._parts.aclose()

    def running(self) -> Running:
        """The parts that run. Raises Unavailable while the server is starting or stopping."""
        if self._running is None:
            raise Unavailable(NOT_RUNNING)
        return self._running

    def running_or_none(self) -> Running | None:
        """The parts that run; None while the server is starting or stopping."""
        return self._running

    @property
    def settings(self) -> Settings:
        """The settings that hold now."""
        return self._started_with if self._running is None else self._running.core.settings

    async def open_answer(self, request: DataRequest) -> Answer:
        """The answer to a request that anyone may send: a probe of health, the page to sign in, the console's files."""
        try:
            request.find_format(self.settings)
            if request.path in PROBES:
                return health.answer(self._running, request.path)
            await self.management()  # it imports the console in its thread, not on the event loop
            from notify.server.console.open_pages import open_page

            page = open_page(request.path, request.query, request.headers)
        except NotifyError as error:
            return Answer.problem(error)
        return Answer(page.status, page.kind, page.body, fields=page.fields, is_shared=page.is_kept)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, as an ASGI application, all requests but those to data routes and probes."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            management = await self.management()
        except Unavailable as error:
            await _refuse(send, error)
        except asyncio.CancelledError:  # by uvicorn, some seconds after this server was told to stop
            await _refuse(send, Unavailable(NOT_RUNNING))
        else:
            await management(scope, receive, send)

    async def management(self) -> Management:
        """The application for operators. The first call loads it, in a thread: that takes a second of CPU, for
        which neither a start nor producers and consumers should wait. Raises Unavailable, with the cause, if it cannot
        be loaded; after RELOAD_SECONDS a call tries again."""
        loading, now_us = self._management, self._clock()
        if loading is None or (now_us >= self._reload_us and loading.done() and loading.exception() is not None):
            self._reload_us = now_us + RELOAD_SECONDS * 1_000_000
            loading = self._management = asyncio.get_running_loop().run_in_executor(None, _loaded, self)
        return await asyncio.shield(loading)  # others may wait for it, too

    async def _live(self, receive: Any, send: Any) -> None:
        """Run the server from uvicorn's first message to its second one."""
        await receive()
        try:
            await self.start()
            self._on_start()
        except NotifyError as error:
            # The caller reports it in one line, instead of a traceback.
            self.failed = error
            self._on_failure()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        try:
            await self.stop()
        except NotifyError as error:
            self.failed = self.failed or error
        await send({"type": "lifespan.shutdown.complete"})


def _loaded(app: App) -> Management:
    try:
        return _managing(app)
    except Exception as error:  # such as too few file descriptors
        faults.unexpected("management_not_loaded", error)
        raise Unavailable(NOT_LOADED) from error


def _managing(app: App) -> Management:
    from notify.server.management import Management

    return Management(app)


async def _refuse(send: Any, error: NotifyError) -> None:
    """Answer with an error, without the application that would answer otherwise."""
    answer = Answer.problem(error)
    headers = [(b"content-type", answer.kind.encode()), (b"content-length", b"%d" % answer.size)]
    if answer.retry_after:
        headers.append((b"retry-after", b"%d" % answer.retry_after))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
