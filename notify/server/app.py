"""The application: data routes straight to the core, everything else through FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.engine import Engine
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from notify import __version__
from notify.errors import InvalidRequest, NotifyError, Unavailable
from notify.server import admin, console, health
from notify.server.access import Access, guard
from notify.server.administration import Administration
from notify.server.alarms import Alarms
from notify.server.check_webhooks import CheckWebhooks
from notify.server.clock import Clock, wall_clock
from notify.server.configuration import Configuration
from notify.server.connections import Connections
from notify.server.core import Core
from notify.server.database import open_database
from notify.server.delivery.instances import states
from notify.server.flow import retry_after
from notify.server.held import Unread, Unverified
from notify.server.history import History
from notify.server.http import Answer, DataRoutes, fault_of, json_check, problem
from notify.server.http import Request as DataRequest
from notify.server.jobs.records import JobRecords
from notify.server.jobs.runner import Jobs
from notify.server.membership import Membership
from notify.server.openapi import describe_data_routes
from notify.server.tasks import ended
from notify.settings import Settings
from notify.storage.sql.registry import Member
from notify.storage.store import TransactionStore
from notify.wire import PROBLEM

CONSUMERS_SHOWN = 200


class App:
    """One server process. Until `start` has recovered the storage every route but health answers 503."""

    def __init__(
        self, settings: Settings, open_store: Callable[[], TransactionStore], clock: Clock = wall_clock
    ) -> None:
        """`clock`: where there is a registry, its database's goes before it."""
        self._clock = clock
        self.settings = settings
        self._open_store = open_store
        self.core: Core | None = None
        self.membership: Membership | None = None
        self.url = settings.url
        """The address to announce."""
        self._database: Engine | None = None
        self.administration: Administration | None = None
        self.history: History | None = None
        self.alarms: Alarms | None = None
        self._webhooks: CheckWebhooks | None = None
        self.jobs: Jobs | None = None
        self.unread = Unread()
        self.unverified = Unverified()
        self.connections = Connections(settings.connections)
        self.failed: NotifyError | None = None
        """Why it could not start."""
        self.on_started: Callable[[], None] = lambda: None
        self.stop_serving: Callable[[], None] = lambda: None
        self._data: DataRoutes | None = None
        self._run: asyncio.Task[None] | None = None
        self.fastapi = _fastapi(self)

    async def start(self) -> None:
        """Recover the storage and begin to serve. Raises StorageFailed or Corrupt."""
        store = self._open_store()
        await store.open(wall_clock())
        self._database = open_database(self.settings.data_dir)
        self.membership = self._membership(store)
        if self.membership is not None:
            await self.membership.start()
        clock = self._clock if self.membership is None else self.membership.clock
        self.core = Core(store, self.settings, clock)
        if self.membership is not None:
            metrics = self.core.metrics
            self.membership.count = lambda: metrics.halves + metrics.published
            self.membership.consumers = self._consumers
        engine = self._database if self.membership is None else self.membership.engine
        self.administration = Administration(self.settings, engine, clock)
        self.administration.on_change = self._configure
        await self.administration.start(self.settings.data_dir)
        self.history = History(self.core)
        self.history.start()
        self.alarms = Alarms(self.core, self._newest_audit)
        self.alarms.start()
        self._webhooks = CheckWebhooks(self.core, json_check)
        self._webhooks.follow(self.administration.configuration.check_webhooks)
        if self.membership is not None:
            await self.membership.announce()
        self._data = DataRoutes(self.core, self.members, self.unread.reply_bytes)
        self._run = asyncio.get_running_loop().create_task(self.core.run())
        self.jobs = Jobs(JobRecords(self._database), self.core)
        await self.jobs.resume()

    def _configure(self, configuration: Configuration) -> None:
        """Other settings or limits hold from now on."""
        self.settings = configuration.settings
        if self.core is not None:
            self.core.configure(configuration.settings, configuration.limits)
        if self._webhooks is not None:
            self._webhooks.follow(configuration.check_webhooks)

    async def _newest_audit(self) -> dict[str, Any] | None:
        assert self.administration is not None
        found = await asyncio.to_thread(self.administration.records.audits, 1)
        return found[0] if found else None

    @property
    def access(self) -> Access | None:
        """None while the server is starting or stopping: then nothing is answered."""
        return None if self.administration is None else self.administration.access

    def _membership(self, store: TransactionStore) -> Membership | None:
        """Its place in the registry, if there is one. Raises InvalidRequest or StorageFailed for a bad one."""
        if not self.settings.registry and store.queues() is not None:
            return None  # what follows needs more than the extra `server`
        from notify.storage.sql import schema
        from notify.storage.sql.dialects import open_engine
        from notify.storage.sql.shards import SqlShards
        from notify.storage.sql.store import SqlStore

        if self.settings.registry:
            engine = open_engine(self.settings.registry)
            schema.check_version(engine)
        elif isinstance(store, SqlShards):
            engine = store.first.engine
        elif isinstance(store, SqlStore):
            engine = store.engine
        else:
            return None
        roles = ("transactions",) if store.queues() is None else roles_of(self.settings)
        name = f"server-{uuid.uuid4().hex[:12]}"
        shards = tuple(store.shards()) or (self.settings.shard,)
        membership = Membership(engine, Member(name, "server", self.url, roles, shards, self.settings.room))
        if isinstance(store, SqlShards):
            membership.shards = store
        return membership

    def _consumers(self) -> list[Member]:
        """The instances of groups that asked this server for messages lately, the first few hundred."""
        core = self.core
        if core is None or not core.has_queues:
            return []
        found: list[Member] = []
        for group in list(core.delivery.groups.values()):
            for name, state in states(group.instances, core.clock()).items():
                if state == "gone" or len(found) >= CONSUMERS_SHOWN:
                    continue
                instance = group.instances[name]
                detail = {"group": group.name, "state": state, "in_flight": instance.in_flight}
                load = instance.per_second or 0.0
                found.append(Member(f"{group.name}/{name}"[:255], "consumer", load=load, detail=detail))
        return found

    def members(self) -> dict[str, Any]:
        """Who is there, as `GET /v1/members` says; without a registry this server alone."""
        if self.membership is not None:
            return self.membership.shown()
        roles = list(roles_of(self.settings))
        alone = {"name": "server", "kind": "server", "url": self.url, "roles": roles, "shards": [self.settings.shard]}
        return {"version": 0, "members": [alone | {"room": self.settings.room, "load": 0.0, "age": 0.0, "detail": {}}]}

    async def stop(self) -> None:
        """Make everything durable and let go."""
        if self.membership is not None:
            await self.membership.stop()
        for part in (self._webhooks, self.alarms, self.history):
            if part is not None:
                await part.stop()
        if self.administration is not None:
            await self.administration.stop()
        if self.jobs is not None:
            await self.jobs.stop()
        await ended(self._run)
        core, self.core, self._data = self.core, None, None
        if core is not None:
            await core.stop()
            await core.store.close()
        if self._database is not None:
            self._database.dispose()

    async def answer(self, request: DataRequest) -> Answer:
        """A request to a data route, or a probe."""
        if request.path in health.PROBES:
            return self._probed(request)
        if self._data is None:
            return Answer.problem(Unavailable("the server is starting or stopping; try again"))
        return await self._data.answer(request)

    def _probed(self, request: DataRequest) -> Answer:
        try:
            request.find_format(self.settings)
        except NotifyError as error:
            return Answer.problem(error)
        return health.answer(self, request.path)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Everything else, as ASGI."""
        if scope["type"] == "http":
            try:
                await guard.admit(scope, self)
            except NotifyError as error:
                await self._refused(scope, error)(scope, receive, send)
                return
            except Exception:
                fault = fault_of("admission_failed", scope["method"], scope["path"])
                await self._refused(scope, fault)(scope, receive, send)
                return
            # FastAPI parses the cookies of every request, by functions that took minutes for some (CVE-2024-7592). The
            # only one that counts has been read.
            scope["headers"] = [field for field in scope["headers"] if field[0] != b"cookie"]
            receive = guard.bounded(receive, self.settings.body_timeout_seconds)
            with contextlib.suppress(Exception):  # raised once more behind the answer that `failed` gave
                await self.fastapi(scope, receive, send)
            return
        await self.fastapi(scope, receive, send)

    def _refused(self, scope: Any, error: NotifyError) -> Response:
        """The answer to whom is not let in: a problem, and to a browser that asks for a page, a page."""
        return console.failed(Request(scope), error) if wants_page(scope) else problem_response(error)


def roles_of(settings: Settings) -> tuple[str, ...]:
    """The roles that a server with queues announces. Raises InvalidRequest for one that does not exist."""
    roles = tuple(role.strip() for role in settings.roles.split(",") if role.strip())
    for role in roles:
        if role not in ("transactions", "queue"):
            raise InvalidRequest(f"setting roles: {role!r} is neither transactions nor queue")
    return roles


def wants_page(scope: Any) -> bool:
    """Whether a browser asks for a page of the console."""
    accept = dict(scope["headers"]).get(b"accept", b"")
    return b"text/html" in accept and not scope["path"].startswith(("/v1/", "/metrics", "/openapi.json"))


def problem_response(error: NotifyError) -> Response:
    """An error as a problem of RFC 9457."""
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(problem(error), error.status, headers, PROBLEM)


def _fastapi(app: App) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await app.start()
        except NotifyError as error:
            # Said in one line by whoever runs the server, instead of a traceback.
            app.failed = error
            app.stop_serving()
            yield
            return
        app.on_started()
        yield
        await app.stop()

    api = FastAPI(title="Notify", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    api.include_router(health.router(app))
    api.include_router(admin.router(app), prefix="/v1/admin")
    api.include_router(console.router(app))
    api.mount("/static", console.static_files())

    @api.exception_handler(NotifyError)
    async def refused(_: Request, error: NotifyError) -> Response:
        return problem_response(error)

    @api.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return problem_response(fault_of("request_failed", request.method, request.scope["path"]))

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # FastAPI's frame refers to the error, whose traceback refers to the frame: they keep the body until a full
        # collection.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        where = ".".join(str(part) for part in first["loc"])
        return Response(problem(InvalidRequest(f"{where}: {first['msg']}", "invalid_schema")), 422, media_type=PROBLEM)

    @api.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"there is no {request.method} {request.scope['path'][:100]}"
        refused = InvalidRequest(detail, codes.get(error.status_code, "invalid"), error.status_code)
        if wants_page(request.scope):
            return console.failed(request, refused)
        return Response(problem(refused), error.status_code, media_type=PROBLEM)

    describe_data_routes(api)
    return api
