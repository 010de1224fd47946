"""The in-memory server: real HTTP on a free port of loopback, the real core, and MemoryStore."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import uvicorn

from notify.client.threads.loop import new_event_loop
from notify.errors import StorageFailed, Unavailable
from notify.protocol import ids
from notify.protocol.wire import Outcomes, decode_payload
from notify.runtime.clock import wall_clock
from notify.server.app import App
from notify.server.configuration import first_token
from notify.server.connections.application import DataAnswers
from notify.server.connections.protocol import Protocol
from notify.server.core.core import Core
from notify.server.data.answer import Answer
from notify.server.data.request import Request
from notify.server.data.routes import DataRoutes
from notify.server.running import Running
from notify.server.settings import Settings
from notify.storage.memory import MemoryStore
from notify.storage.records import State, StoredMessage

T = TypeVar("T")
START_SECONDS = 60.0
SETTLE_SECONDS = 30.0


class _Named(msgspec.Struct):
    id: str


class _Halves(msgspec.Struct):
    """The ids of a request of halves."""

    transactions: list[_Named]


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in the server. `state`: PREPARED, COMMITTED, ROLLED_BACK or PARKED."""

    id: str
    topic: str
    body: bytes
    key: str | None
    tag: str | None
    state: str

    @property
    def text(self) -> str:
        """The body as UTF-8 text."""
        return self.body.decode()

    def json(self) -> Any:
        """The body as a JSON value."""
        return msgspec.json.decode(self.body)


@dataclass(frozen=True, slots=True)
class Entrance:
    """Another address of an InMemoryServer. `close` cuts all connections that came through it, and takes no more."""

    url: str
    close: Callable[[], None]


class _Faults:
    """Loses the outcomes and answers that a test wants lost, and counts answered and unanswered requests."""

    def __init__(self, inner: DataAnswers) -> None:
        """`inner` answers the requests that are not lost."""
        self._inner = inner
        self.lose_outcomes = False
        self._lost: set[str] = set()
        """The ids of transactions whose outcome is lost each time that it is sent."""
        self.lose_answers = ""
        self.is_down = False
        self.under_way: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    async def answer(self, request: Request) -> Answer:
        self.under_way[request.path] += 1
        try:
            return await self._answer(request)
        finally:
            self.under_way[request.path] -= 1
            self.answered[request.path] += 1

    async def _answer(self, request: Request) -> Answer:
        if self.is_down:
            return Answer.problem(Unavailable("the test has taken the server down"))
        if request.path == "/v1/transactions" and self.lose_outcomes and (halves := _decoded(request, _Halves)):
            self._lost.update(half.id for half in halves.transactions)
        if request.path == "/v1/transactions/outcomes" and self._is_lost(request):
            return Answer.problem(Unavailable("the test loses this outcome"))
        answer = await self._inner.answer(request)
        if self.lose_answers and request.path == self.lose_answers:
            return Answer.problem(Unavailable("the test loses this answer; the request was carried out"))
        return answer

    def _is_lost(self, request: Request) -> bool:
        """Whether the request has an outcome that gets lost. Answers to checks never get lost."""
        outcomes = _decoded(request, Outcomes)
        sent = {outcome.id for outcome in outcomes.outcomes if outcome.check is None} if outcomes else set()
        if self.lose_outcomes:
            self._lost |= sent
        return not sent.isdisjoint(self._lost)


class _TestedApp(App):
    """A server that passes each request to a data route through `faults`."""

    faults: _Faults

    async def start(self) -> None:
        await super().start()
        if isinstance(self.data, DataRoutes):
            self.data.invites_outcomes = False  # an outcome in a request of halves could only get lost with the halves
        self.data = self.faults = _Faults(self.data)


def _decoded(request: Request, kind: type[T]) -> T | None:
    """The decoded body of a request; None if it is malformed, which the server refuses."""
    is_packed = any(b"msgpack" in value for name, value in request.headers if name == b"content-type")
    decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
    with contextlib.suppress(msgspec.DecodeError):
        return decode(request.body, type=kind)
    return None


class InMemoryServer:
    """A server for one test or for several. Use it in a `with` statement, or call `start` and `stop`."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: settings of `notify serve`, such as `check_attempts=2`. Raises InvalidRequest."""
        self._directory = tempfile.TemporaryDirectory(prefix="notify-test-")
        defaults = {"check_backoff_seconds": 0.1, "check_backoff_max_seconds": 0.2, "alarm_disk_share": 0.0}
        self._settings = Settings(**(defaults | settings | {"data_dir": self._directory.name, "port": 0}))
        self._offset_us = 0
        self._frozen_us: int | None = None
        self._store = MemoryStore(self._clock)
        self._loop = new_event_loop()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._app: _TestedApp
        self.url = ""
        """The server's address, once it has started."""

    # --- running ----------------------------------------------------------------------------------------------

    def start(self) -> InMemoryServer:
        """Start the server. Raises StorageFailed if it cannot start."""
        self._serve(0)
        return self

    def restart(self) -> None:
        """Stop and start again at the same address with the same data. Leases are lost, as after any restart."""
        self._end()
        self._serve(int(self.url.rpartition(":")[2]))

    def forget(self) -> None:
        """Forget all messages, topics and groups, as a new server. Its address, clock and settings stay."""

        self._started()

        async def forgotten() -> None:
            await self._app.stop()
            self._store = MemoryStore(self._clock)
            await self._app.start()

        self._call(forgotten())

    def entrance(self) -> Entrance:
        """Open another address of this server, which a test can close with all connections that came through it."""
        return self._call(self._opened(self._started()))

    async def _opened(self, server: uvicorn.Server) -> Entrance:
        protocols: list[Protocol] = []

        def connected() -> Protocol:
            state = server.lifespan.state
            protocols.append(Protocol(config=server.config, server_state=server.server_state, app_state=state))
            return protocols[-1]

        listening = await self._loop.create_server(connected, "127.0.0.1", 0)

        async def close() -> None:
            listening.close()
            for protocol in protocols:
                if protocol.transport is not None and not protocol.transport.is_closing():
                    protocol.transport.abort()

        port = listening.sockets[0].getsockname()[1]
        return Entrance(f"http://127.0.0.1:{port}", lambda: self._call(close()))

    def _started(self) -> uvicorn.Server:
        if self._server is None:
            raise Unavailable("the server in memory is not started")
        return self._server

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SETTLE_SECONDS)

    def _serve(self, port: int) -> None:
        self._app = _TestedApp(self._settings, lambda: self._store, clock=self._clock)
        config = uvicorn.Config(
            self._app, http=Protocol, ws="none", lifespan="on", interface="asgi3", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        listening = socket.create_server(("127.0.0.1", port))
        self.url = self._app.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # keep those of the test

        async def serve() -> None:
            await server.serve([listening])
            for connection in list(server.server_state.connections):  # did not end within the graceful shutdown
                cast(Protocol, connection).abort()

        def run() -> None:
            with listening:
                self._loop.run_until_complete(serve())

        self._thread = threading.Thread(target=run, name="notify-in-memory", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise StorageFailed(f"the server in memory did not start: {self._app.failed}")
            time.sleep(0.002)

    def stop(self) -> None:
        """Stop the server. Its data is lost."""
        if self._server is not None:
            self._end()
            # Not in this thread: where a loop is running (a coroutine, a notebook), no other one may.
            closing = threading.Thread(target=self._close_loop, name="notify-in-memory")
            closing.start()
            closing.join()
        self._directory.cleanup()

    def _close_loop(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _end(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(START_SECONDS)
            self._server = None

    def __enter__(self) -> InMemoryServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def admin_token(self) -> str:
        """The first token, which has the right to make others. Only a started server with `access=True` has it."""
        return (Path(self._directory.name) / first_token.FILE).read_text().strip()

    # --- time -------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The server's time, in UTC."""
        return datetime.fromtimestamp(self._clock() / 1_000_000, UTC)

    def advance(self, seconds: float) -> None:
        """Advance the server's clock, and let all delays, retries, leases, checks and schedules that are then
        due happen.

        They have happened when this returns: leases have expired, and delayed messages are in their queues.
        """
        if seconds < 0:
            raise ValueError("seconds must not be negative")
        self._offset_us += round(seconds * 1_000_000)
        if self._server is not None and self._app.running_or_none() is not None:
            self.inside(_acted)

    def freeze(self) -> None:
        """Stop the server's clock: only `advance` moves it, so that no lease expires on a slow machine."""
        if self._frozen_us is None:
            self._frozen_us = wall_clock()

    def _clock(self) -> int:
        return (wall_clock() if self._frozen_us is None else self._frozen_us) + self._offset_us

    # --- faults -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def losing_outcomes(self) -> Iterator[None]:
        """Lose all outcomes except answers to checks, so that the server has to check.

        The outcomes of transactions that begin in the block are also lost if they are sent after it. This tests your
        service's answers to checks.
        """
        self._app.faults.lose_outcomes = True
        try:
            yield
        finally:
            self._app.faults.lose_outcomes = False

    @contextlib.contextmanager
    def losing_answers(self, path: str) -> Iterator[None]:
        """Carry out requests to this path, but answer them with 503."""
        self._app.faults.lose_answers = path
        try:
            yield
        finally:
            self._app.faults.lose_answers = ""

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Answer every data route with 503."""
        self._app.faults.is_down = True
        try:
            yield
        finally:
            self._app.faults.is_down = False

    # --- contents ---------------------------------------------------------------------------------------------

    def messages(self, topic: str | None = None) -> list[Stored]:
        """The messages that can be delivered, of one topic or of all, in the order of their queues."""
        return [message for message in self._stored(topic) if message.state == State.COMMITTED.name]

    def halves(self, topic: str | None = None) -> list[Stored]:
        """The messages of undecided transactions, of one topic or of all."""
        undecided = (State.PREPARED.name, State.PARKED.name)
        return [message for message in self._stored(topic) if message.state in undecided]

    def under_way(self, path: str) -> int:
        """How many requests to a data route are not answered yet, for example because consumers wait."""
        return self._app.faults.under_way[path]

    def answered(self, path: str) -> int:
        """How many requests to a data route the server has answered since its start."""
        return self._app.faults.answered[path]

    def wait_for(self, topic: str, count: int, seconds: float = SETTLE_SECONDS) -> list[Stored]:
        """Wait until a topic has `count` messages, and return them. Raises AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while len(messages := self.messages(topic)) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"topic {topic!r} has {len(messages)} messages after {seconds:g} s, not {count}")
            time.sleep(0.01)
        return messages

    def wait_until_decided(self, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until no transaction is in doubt. Raises AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while halves := self.halves():
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(halves)} messages are still in doubt, the first is {halves[0]}")
            time.sleep(0.01)

    def inside(self, act: Callable[[Running], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the server's parts, in its event loop. Raises Unavailable if the server is not started.

        This is for tests of the server itself: its parts change from version to version.
        """

        self._started()

        async def acted() -> T:
            return await act(self._app.running())

        return self._call(acted())

    def open_connections(self) -> int:
        """How many connections the server has now."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    def _stored(self, topic: str | None) -> list[Stored]:
        return self.inside(lambda running: self._look(running.core, topic))

    async def _look(self, core: Core, topic: str | None) -> list[Stored]:
        stored: list[Stored] = []
        for known_topic in core.queues.topics():
            name = known_topic.name
            if topic not in (None, name):
                continue
            for queue in range(known_topic.queues):
                queued = core.queues.read(name, queue, 0, 1_000_000, 1 << 40)
                stored += [_stored_message(message, State.COMMITTED) for message in queued]
        for transaction in await core.store.undecided(None, None, None, 1_000_000):
            messages = [message for message in transaction.messages if topic in (None, message.topic)]
            stored += [_stored_message(message, transaction.state) for message in messages]
        return stored


async def _acted(running: Running) -> None:
    await running.core.act()
    await running.schedules.send_due()


def _stored_message(message: StoredMessage, state: State) -> Stored:
    payload = decode_payload(message.payload)
    message_id = ids.message_id(message.transaction_id, message.message_no)
    return Stored(message_id, message.topic, payload.body, payload.key, payload.tag, state.name)
