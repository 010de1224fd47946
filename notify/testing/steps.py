"""Steps: the moments at which the crash explorer lets a process die, or a COMMIT fail.

A step is a statement of the database, a COMMIT, or a call of the SDK to the server, each with the line of the service's
own code that made it. The SDK's work in the background, such as its long polls, has no such line and no steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import socket
import sqlite3
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import event

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.client.consumer.session import Settler
from notify.client.handling.handlers import Handler, is_own_code
from notify.client.producer.async_producer import AsyncTransactionProducer
from notify.client.producer.half_sender import HalfSender
from notify.client.producer.outgoing import LoopOutgoing, ThreadOutgoing

MOST_FRAMES = 1000
STATEMENT_CHARACTERS = 60
_MYSQL_LOST = 2013
"""The code of MySQL's clients for a connection that was lost during a query."""
_SDK = str(Path(__file__).parents[1])
_READS = re.compile(r"\s*(?:SELECT|PRAGMA|SHOW|DESCRIBE)\b(?!.*\bFOR UPDATE\b)", re.IGNORECASE | re.DOTALL)
AT_COMMIT, AFTER_COMMIT = "before COMMIT", "after COMMIT"


@dataclass(frozen=True, slots=True)
class Step:
    """A moment in the run of a process: `what` is about to happen or has happened, at a line of the service's code.
    `number`: 1 for the first time that this happens in the run, and so on."""

    what: str
    file: str
    line: int
    number: int

    @property
    def code(self) -> str:
        """The line of code; empty if its file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        file = self.file
        with contextlib.suppress(ValueError):
            file = str(Path(file).relative_to(Path.cwd()))
        times = f" (time {self.number})" if self.number > 1 else ""
        return f"{self.what}{times} at {file}:{self.line}" + (f"\n    {self.code}" if self.code else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """The event of a run, at a step: the process is killed, or a COMMIT fails and the process lives on."""

    step: Step
    is_kill: bool

    def __str__(self) -> str:
        if self.is_kill:
            return f"killed {self.step}"
        if self.step.what == AT_COMMIT:
            return f"the database refused the COMMIT: {self.step}"
        return f"the answer to the COMMIT was lost: {self.step}"


def faults_at(step: Step) -> list[Fault]:
    """The faults that the explorer tries at a step."""
    return [Fault(step, True)] + ([Fault(step, False)] if step.what in (AT_COMMIT, AFTER_COMMIT) else [])


class Watched(Protocol):
    """The run of a process, which hears of its steps."""

    url: str
    """The address of the server by which this process knows it."""

    def check_alive(self) -> None:
        """Raises Crashed if the process is dead."""

    def meet(self, what: str, file: str, line: int) -> bool:
        """A step. Raises Crashed if the process is dead, or dies here; True if the COMMIT is to fail."""

    def started(self, outgoing: ThreadOutgoing | LoopOutgoing) -> None:
        """A producer has started, or was used again."""


class _Hooks:
    """Hears of the steps in this process (of the operating system) while it is installed."""

    def __init__(self) -> None:
        self._runs: dict[str, Watched] = {}
        """The runs by the address that they use."""
        self._live: Watched | None = None
        self._by_dialect: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()
        self._outside: weakref.WeakSet[Any] = weakref.WeakSet()
        """The dialects of the explorer's own engines."""
        self.handlers: dict[str, Handler] = {}
        """The handlers of the live run's messages, by their leases."""
        self._connections: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        """The drivers' connections of each run."""

    def begin(self, run: Watched) -> None:
        """From now on, new engines belong to this run."""
        self._live = run
        self._runs[_place(run.url)] = run
        self.handlers.clear()

    def leave_out(self, engine: sa.Engine) -> None:
        """An engine that no run uses, although the service's code may be among the callers."""
        self._outside.add(engine.dialect)

    def owns(self, run: Watched, engine: Any) -> bool:
        """Whether a part of a run has an engine that no other run uses; from now on the engine is this run's."""
        if engine is None:
            return True
        dialect = getattr(engine, "sync_engine", engine).dialect
        owner = self._by_dialect.setdefault(dialect, run)
        self._wrap_commit(dialect, owner)
        return owner is run

    def run_of(self, url: str) -> Watched | None:
        """The run of a part of the SDK that uses this address."""
        return self._runs.get(_place(url))

    def _run_of_dialect(self, dialect: Any) -> Watched | None:
        """The run of an engine; None for an engine that neither the service's own code nor a part of it uses, such as
        one of the server."""
        if dialect in self._outside:
            return None
        run = self._by_dialect.get(dialect)
        if run is None and self._live is not None and (_handler.get() is not None or _own_line() is not None):
            run = self._by_dialect[dialect] = self._live
            self._wrap_commit(dialect, run)
        return run

    @contextlib.contextmanager
    def handling(self, url: str, lot: Any) -> Iterator[None]:
        """A consumer calls a handler for a lot of messages within this context."""
        run, handler = self.run_of(url), lot[0][0].handler
        if run is None or handler is None:
            yield
            return
        self.handlers[lot[0][0].lease] = handler
        token = _handler.set(handler)
        try:
            meet(run, f"before the handler of {handler.topic}", handler)
            yield
        finally:
            _handler.reset(token)

    # --- the database -----------------------------------------------------------------------------------------

    def connected(self, connection: sa.Connection) -> None:
        run = self._run_of_dialect(connection.dialect)
        if run is not None:
            run.check_alive()
            with contextlib.suppress(TypeError):  # a driver whose connections have no weak references
                self._connections.setdefault(run, weakref.WeakSet()).add(connection.connection.driver_connection)

    def executes(self, connection: sa.Connection, cursor: Any, statement: str, *given: Any) -> None:
        run = self._run_of_dialect(connection.dialect)
        if run is not None and _READS.match(statement) and not _is_called_by_service():
            run.check_alive()  # nothing has changed since the step before
        elif run is not None:
            meet(run, f"before {_shortened(statement)}")

    def _wrap_commit(self, dialect: Any, run: Watched) -> None:
        if "do_commit" in vars(dialect):
            return
        commit = dialect.do_commit

        def do_commit(connection: Any) -> None:
            if meet(run, AT_COMMIT):
                dialect.do_rollback(connection)
                raise _error(dialect, "the database refused the COMMIT (simulated)")
            commit(connection)
            if meet(run, AFTER_COMMIT):
                raise _error(dialect, "the answer to the COMMIT was lost (simulated)")

        dialect.do_commit = do_commit

    def cut(self, run: Watched) -> None:
        """Cut a dead run's connections to databases, which roll back what it has not committed."""
        for connection in list(self._connections.get(run, ())):
            with contextlib.suppress(Exception):
                _cut(connection)

    def close(self, run: Watched) -> None:
        """Close the connections that were cut, once no thread uses them any more."""
        for connection in list(self._connections.pop(run, ())):
            with contextlib.suppress(Exception):
                libpq = getattr(connection, "pgconn", None)
                if libpq is not None:
                    libpq.finish()  # psycopg's own `close` may be a coroutine
                elif not inspect.iscoroutinefunction(connection.close):
                    connection.close()

    # --- installing -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hear of the steps within this context."""
        with contextlib.ExitStack() as stack:
            for name, listener in (("engine_connect", self.connected), ("before_cursor_execute", self.executes)):
                event.listen(sa.Engine, name, listener)
                stack.callback(event.remove, sa.Engine, name, listener)
            for owner, name, wrap in _WRAPPED:
                original = getattr(owner, name)
                setattr(owner, name, functools.wraps(original)(wrap(self, original)))
                stack.callback(setattr, owner, name, original)
            stack.callback(self._forget)
            yield

    def _forget(self) -> None:
        for dialect in list(self._by_dialect):
            vars(dialect).pop("do_commit", None)
        self._by_dialect.clear()
        self._runs.clear()
        self._connections.clear()
        self._live = None


HOOKS = _Hooks()
"""The hooks of this process: SQLAlchemy's events and the SDK's methods are the process's, too."""


def meet(run: Watched, what: str, handler: Handler | None = None) -> bool:
    """A step, if the service's own code made it; see Watched.meet. `handler`: whose message it is about."""
    place = _own_line() if handler is None else None
    handler = handler or _handler.get()
    if place is None and handler is not None:
        code = getattr(_unwrapped(handler.call), "__code__", None)
        place = None if code is None else (code.co_filename, code.co_firstlineno)
    if place is None:
        run.check_alive()
        return False
    return run.meet(what, *place)


_handler: ContextVar[Handler | None] = ContextVar("handler", default=None)
"""The handler whose message this thread or task is busy with."""


def _unwrapped(function: Any) -> Any:
    while True:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if inner is None:
            return getattr(function, "__func__", function)
        function = inner


def _frames() -> Iterator[FrameType]:
    """The frames of the caller, the innermost first, without those of these hooks."""
    frame: FrameType | None = sys._getframe(1)
    greenlet = sys.modules.get("greenlet")
    inner = greenlet.getcurrent() if greenlet is not None else None
    for _ in range(MOST_FRAMES):
        while frame is None:
            # SQLAlchemy runs the statements of coroutines in a greenlet; the coroutine waits in its parent.
            inner = None if inner is None else inner.parent
            if inner is None:
                return
            frame = inner.gr_frame
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _own_line() -> tuple[str, int] | None:
    """The file and line of the innermost frame that is the service's own code; None if there is none."""
    own = next((frame for frame in _frames() if is_own_code(frame.f_code.co_filename)), None)
    return None if own is None else (own.f_code.co_filename, own.f_lineno)


def _is_called_by_service() -> bool:
    """Whether the service's own code executes a statement, and not the SDK."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(_SDK):
            return False
        if is_own_code(file):
            return True
    return False


def _place(url: str) -> str:
    return urlsplit(url.partition(",")[0]).netloc


def _shortened(statement: str) -> str:
    line = re.sub(r"\s+", " ", statement).strip()
    return line if len(line) <= STATEMENT_CHARACTERS else f"{line[:STATEMENT_CHARACTERS]}…"


def _error(dialect: Any, text: str) -> Exception:
    """An error as the driver raises it for a connection that fails at the COMMIT."""
    kind = getattr(dialect.loaded_dbapi, "OperationalError", None) or dialect.loaded_dbapi.DatabaseError
    error: Exception = kind(_MYSQL_LOST, text) if dialect.name in ("mysql", "mariadb") else kind(text)
    return error


def _cut(connection: Any) -> None:
    """Cut a driver's connection, from any thread, also while another one uses it."""
    sqlite = connection if isinstance(connection, sqlite3.Connection) else getattr(connection, "_conn", None)
    if isinstance(sqlite, sqlite3.Connection):
        sqlite.interrupt()
        sqlite.rollback()
        sqlite.close()
        return
    own_socket = getattr(connection, "_sock", None)  # PyMySQL's
    if own_socket is not None:
        own_socket.shutdown(socket.SHUT_RDWR)
    elif hasattr(connection, "fileno"):
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    else:
        connection.close()


# --- the SDK's methods ----------------------------------------------------------------------------------------


def _start(hooks: _Hooks, original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: ThreadOutgoing | LoopOutgoing) -> Any:
        run = hooks.run_of(self._plan.url)
        if run is not None:
            run.check_alive()
            run.started(self)
        return original(self)

    return start


def _half(hooks: _Hooks, original: Callable[..., None]) -> Callable[..., None]:
    def store_half(self: HalfSender, pending: Any, messages: Sequence[Any], source: str) -> None:
        run = _run_of_sender(hooks, self)
        topics = _topics(messages)
        if run is not None:
            meet(run, f"before the half of {topics}")
        original(self, pending, messages, source)
        if run is not None:
            meet(run, f"after the half of {topics}")

    return store_half


def _outcome(hooks: _Hooks, original: Callable[..., None]) -> Callable[..., None]:
    def committed(self: HalfSender, pending: Any) -> None:
        run = _run_of_sender(hooks, self)
        if run is None or not pending.prepared:
            return original(self, pending)
        topics = _topics(pending.messages)
        meet(run, f"before the outcome of {topics}")
        original(self, pending)
        meet(run, f"after the outcome of {topics}")
        return None

    return committed


def _publish(hooks: _Hooks, original: Callable[..., str]) -> Callable[..., str]:
    def publish(self: ThreadOutgoing, message: Any) -> str:
        run = hooks.run_of(self._plan.url)
        if run is not None:
            meet(run, f"before publishing {message.topic}")
        message_id = original(self, message)
        if run is not None:
            meet(run, f"after publishing {message.topic}")
        return message_id

    return publish


def _publish_async(hooks: _Hooks, original: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    async def publish(self: AsyncTransactionProducer, message: Any) -> str:
        run = hooks.run_of(self.url)
        if run is not None:
            meet(run, f"before publishing {message.topic}")
        message_id = await original(self, message)
        if run is not None:
            meet(run, f"after publishing {message.topic}")
        return message_id

    return publish


def _handle(hooks: _Hooks, original: Callable[..., Any]) -> Callable[..., Any]:
    """For the methods of consumers that call a handler for a lot of messages: the argument that is a list."""

    def handle(self: Any, *given: Any) -> Any:
        lot = next(argument for argument in given if isinstance(argument, list))
        with hooks.handling(self.url, lot):
            return original(self, *given)

    return handle


def _handle_async(hooks: _Hooks, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handle(self: AsyncConsumer, hand: Any, lot: Any) -> None:
        with hooks.handling(self.url, lot):
            await original(self, hand, lot)

    return handle


def _settle(hooks: _Hooks, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def settle(self: Settler, settlings: Sequence[Any]) -> Any:
        run = hooks.run_of(self._http.url)
        items = [settling.item for settling in settlings if settling.item.action != "renew"]
        handler = next((hooks.handlers[lease] for item in items if (lease := _lease(item)) in hooks.handlers), None)
        if run is None or handler is None:
            return await original(self, settlings)
        what = " and ".join(sorted({item.action for item in items}))
        meet(run, f"before {what}", handler)
        answers = await original(self, settlings)
        meet(run, f"after {what}", handler)
        return answers

    return settle


def _lease(item: Any) -> str:
    return str(item.receipt).rpartition(".")[0]


def _run_of_sender(hooks: _Hooks, sender: HalfSender) -> Watched | None:
    plan = getattr(sender._outgoing, "_plan", None)
    return None if plan is None else hooks.run_of(plan.url)


def _topics(messages: Sequence[Any]) -> str:
    return ", ".join(sorted({message.topic for message in messages}))


_WRAPPED: tuple[tuple[Any, str, Callable[[_Hooks, Any], Any]], ...] = (
    (ThreadOutgoing, "start", _start),
    (LoopOutgoing, "start", _start),
    (HalfSender, "_store_half", _half),
    (HalfSender, "committed", _outcome),
    (ThreadOutgoing, "publish", _publish),
    (AsyncTransactionProducer, "publish", _publish_async),
    (Consumer, "_handle", _handle),
    (AsyncConsumer, "_begin", _handle),
    (AsyncConsumer, "_handle_batch", _handle_async),
    (Settler, "_settle", _settle),
)
