"""Steps: the moments at which the crash explorer lets a process die, or a COMMIT fail.

A step is a statement of the database, a COMMIT, or a call of the SDK to the server, each with the line of the service's
own code that made it. The SDK's work in the background, such as its long polls, has no such line and no steps; but what
a handler's message or a relay goes through has the line of the handler, or the one that started the relay.
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
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import event

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.client.consumer.session import Settler
from notify.client.handling.handlers import Handler, is_own_code
from notify.client.producer.async_producer import AsyncTransactionProducer
from notify.client.producer.half_sender import HalfSender
from notify.client.producer.outgoing import LoopOutgoing, ThreadOutgoing

if TYPE_CHECKING:
    from notify.testing.django_steps import DjangoProcesses

MOST_FRAMES = 1000
STATEMENT_CHARACTERS = 60
_MYSQL_LOST = 2013
"""The code of MySQL's clients for a connection that was lost during a query."""
_SDK = str(Path(__file__).parents[1])
_READS = re.compile(r"\s*(?:SELECT|PRAGMA|SHOW|DESCRIBE)\b(?!.*\bFOR UPDATE\b)", re.IGNORECASE | re.DOTALL)
_BEGINS = re.compile(r"\s*(?:BEGIN|START TRANSACTION|SET)\b", re.IGNORECASE)
"""Statements that prepare others, and change nothing themselves."""
AT_COMMIT, AFTER_COMMIT = "before COMMIT", "after COMMIT"
REFUSED_COMMIT, LOST_COMMIT = (
    "the database refused the COMMIT (simulated)",
    "the answer to the COMMIT was lost (simulated)",
)
Place = tuple[str, int]
"""A file and a line of the service's own code."""


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
    relay_place: Place | None
    """The line that started this process's relay; None without one."""

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
        self._owners: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()
        """The runs by what they alone use: dialects of SQLAlchemy's engines, and connections of Django's."""
        self._outside: weakref.WeakSet[Any] = weakref.WeakSet()
        """The dialects of the explorer's own engines."""
        self._parts: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()
        """The runs of consumers over Kafka, whose address all runs share."""
        self._explorer: int | None = None
        """The explorer's thread, in which no run has a step: there `causes` and `effects` are read."""
        self.handlers: dict[str, Handler] = {}
        """The handlers of the live run's messages, by their leases."""
        self._connections: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        """The drivers' connections of each run, by their ids."""
        self._installed: contextlib.ExitStack | None = None
        self._wrapped: set[Any] = set()
        self._django: DjangoProcesses | None = None

    def begin(self, run: Watched) -> None:
        """From now on, new engines belong to this run."""
        self._live = run
        self._runs[_host(run.url)] = run
        self.handlers.clear()
        self.look_for_django()
        if self._django is not None:
            self._django.begin(run.url)

    def look_for_django(self) -> None:
        """Hear of Django's connections, once the service has loaded Django."""
        if self._django is not None or self._installed is None or "django.db" not in sys.modules:
            return
        from django.conf import settings

        if settings.configured:
            from notify.testing.django_steps import WRAPPED, DjangoProcesses

            self._django = DjangoProcesses()
            self.wrap(WRAPPED)

    @property
    def kept_modules(self) -> set[str]:
        """The modules that a process cannot import again: those of Django's models."""
        return set() if self._django is None else self._django.kept_modules()

    def leave_out(self, engine: sa.Engine) -> None:
        """An engine that no run uses, although the service's code may be among the callers."""
        self._outside.add(engine.dialect)

    def owns(self, run: Watched, engine: Any) -> bool:
        """Whether a part of a run has an engine that no other run uses; from now on the engine is this run's."""
        if engine is None:
            return True
        dialect = getattr(engine, "sync_engine", engine).dialect
        owner = self._owners.setdefault(dialect, run)
        self._wrap_commit(dialect, owner)
        return owner is run

    def run_of(self, url: str) -> Watched | None:
        """The run of a part of the SDK that uses this address."""
        return self._runs.get(_host(url))

    def claim(self, part: AsyncConsumer | Consumer, run: Watched) -> None:
        """A consumer over Kafka belongs to this run."""
        self._parts[part] = run

    def run_of_hand(self, hand: Any) -> Watched | None:
        """The run of the consumer over Kafka that has this hand."""
        return next((run for part, run in list(self._parts.items()) if part._hand is hand), None)

    def owner_of(self, used: Any) -> Watched | None:
        """The run of an engine's dialect, or of a connection of Django's; None for what neither the service's own code
        nor a part of it uses, such as an engine of the server."""
        if used in self._outside or threading.get_ident() == self._explorer:
            return None
        run = self._owners.get(used)
        if run is None and self._live is not None and (_place.get() is not None or _own_line() is not None):
            run = self._owners[used] = self._live
        return run

    def _run_of_dialect(self, dialect: Any) -> Watched | None:
        run = self.owner_of(dialect)
        if run is not None:
            self._wrap_commit(dialect, run)
        return run

    @contextlib.contextmanager
    def handling(self, part: AsyncConsumer | Consumer, lot: Any) -> Iterator[None]:
        """A consumer calls a handler for a lot of messages within this context."""
        run, handler = self._parts.get(part) or self.run_of(part.url), lot[0][0].handler
        if run is None or handler is None:
            yield
            return
        self.handlers[lot[0][0].lease] = handler
        place = place_of_handler(handler)
        with at_place(place):
            meet(run, f"before the handler of {handler.topic}", place)
            yield

    # --- the database -----------------------------------------------------------------------------------------

    def connected(self, connection: sa.Connection) -> None:
        run = self._run_of_dialect(connection.dialect)
        if run is not None:
            self.note(run, connection.connection.driver_connection)

    def note(self, run: Watched, driver: Any) -> None:
        """Note that a run has a driver's connection, which is cut when it dies. Raises Crashed if it is dead."""
        try:
            run.check_alive()
        except BaseException:
            _finish(driver)
            raise
        if not isinstance(driver, sqlite3.Connection) or self._django is not None:  # each run has a file of its own
            self._connections.setdefault(run, {})[id(driver)] = driver

    def executes(self, connection: sa.Connection, cursor: Any, statement: str, *given: Any) -> None:
        run = self._run_of_dialect(connection.dialect)
        if run is not None:
            executing(run, statement)

    def _wrap_commit(self, dialect: Any, run: Watched) -> None:
        if "do_commit" in vars(dialect):
            return
        commit = dialect.do_commit

        def do_commit(connection: Any) -> None:
            if meet(run, AT_COMMIT):
                dialect.do_rollback(connection)
                raise commit_error(dialect.loaded_dbapi, dialect.name, REFUSED_COMMIT)
            commit(connection)
            if meet(run, AFTER_COMMIT):
                raise commit_error(dialect.loaded_dbapi, dialect.name, LOST_COMMIT)

        dialect.do_commit = do_commit

    def cut(self, run: Watched) -> None:
        """Cut a dead run's connections to databases, which roll back what it has not committed."""
        for connection in list(self._connections.get(run, {}).values()):
            with contextlib.suppress(Exception):
                _cut(connection)

    def close(self, run: Watched) -> None:
        """Close the connections that were cut, once no thread uses them any more."""
        for connection in list(self._connections.pop(run, {}).values()):
            _finish(connection)

    # --- installing -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self, explorer: int | None = None) -> Iterator[None]:
        """Hear of the steps within this context. `explorer`: the explorer's thread, where it shares this process with
        the service's."""
        self._explorer = explorer
        with contextlib.ExitStack() as stack:
            self._installed = stack
            for name, listener in (("engine_connect", self.connected), ("before_cursor_execute", self.executes)):
                event.listen(sa.Engine, name, listener)
                stack.callback(event.remove, sa.Engine, name, listener)
            stack.callback(self._forget)
            self.wrap(_WRAPPED)
            yield

    def wrap(self, methods: Sequence[Wrapped]) -> None:
        """Wrap methods until the end of `installed`; again, this does nothing."""
        if self._installed is None:
            return
        for owner, name, wrap in methods:
            if (owner, name) not in self._wrapped:
                original = getattr(owner, name)
                setattr(owner, name, functools.wraps(original)(wrap(self, original)))
                self._installed.callback(setattr, owner, name, original)
                self._wrapped.add((owner, name))

    def _forget(self) -> None:
        for dialect in list(self._owners):
            vars(dialect).pop("do_commit", None)
        self._owners.clear()
        self._parts.clear()
        self._wrapped.clear()
        self._runs.clear()
        self._connections.clear()
        self._live = self._explorer = self._installed = None
        if self._django is not None:
            self._django.end()
            self._django = None


Wrapped = tuple[Any, str, Callable[[_Hooks, Any], Any]]
"""A class, the name of its method, and what makes the hooks' method of it."""


HOOKS = _Hooks()
"""The hooks of this process: SQLAlchemy's events and the SDK's methods are the process's, too."""


def executing(run: Watched, statement: str) -> None:
    """A statement of the database, which is a step unless it changes nothing."""
    if _BEGINS.match(statement) or (_READS.match(statement) and not _is_called_by_service()):
        run.check_alive()  # nothing has changed since the step before
    else:
        meet(run, f"before {_shortened(statement)}")


def meet(run: Watched, what: str, place: Place | None = None) -> bool:
    """A step, if the service's own code made it; see Watched.meet. `place`: the line that it is about, where its caller
    is not the service's own code."""
    place = place or _own_line() or _place.get()
    if place is None:
        run.check_alive()
        return False
    return run.meet(what, *place)


_place: ContextVar[Place | None] = ContextVar("place", default=None)
"""The line of the handler, or of the relay, whose message this thread or task is busy with."""


@contextlib.contextmanager
def at_place(place: Place | None) -> Iterator[None]:
    """Steps of this context are about this line."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def place_of_handler(handler: Handler) -> Place | None:
    code = getattr(_unwrapped(handler.call), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def place_of_caller() -> Place | None:
    """The line of the service's own code that calls."""
    return _own_line()


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


def _own_line() -> Place | None:
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


def _host(url: str) -> str:
    return urlsplit(url.partition(",")[0]).netloc


def _shortened(statement: str) -> str:
    line = re.sub(r"\s+", " ", statement).strip()
    return line if len(line) <= STATEMENT_CHARACTERS else f"{line[:STATEMENT_CHARACTERS]}…"


def commit_error(driver: Any, database: str, text: str) -> Exception:
    """An error as a driver's module raises it for a connection to this kind of database that fails at the COMMIT."""
    kind = getattr(driver, "OperationalError", None) or driver.DatabaseError
    error: Exception = kind(_MYSQL_LOST, text) if database in ("mysql", "mariadb") else kind(text)
    return error


def _cut(connection: Any) -> None:
    """Cut a driver's connection, from any thread, also while another one uses it.

    A connection of sqlite3 may only be interrupted then: closed by another thread, it would end this process. The
    thread that uses it rolls back when its next step raises Crashed. aiosqlite has a thread for each connection.
    """
    if isinstance(connection, sqlite3.Connection):
        connection.interrupt()
        return
    if type(connection).__module__.startswith("aiosqlite"):
        connection._conn.interrupt()
        connection._tx.put_nowait((None, connection._conn.rollback))  # a cursor would keep it open after its end
        connection.stop()
        return
    own_socket = getattr(connection, "_sock", None)  # PyMySQL's
    if own_socket is not None:
        own_socket.shutdown(socket.SHUT_RDWR)
    elif hasattr(connection, "fileno"):
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    else:
        connection.close()


def _finish(connection: Any) -> None:
    """Close a dead process's connection. One of sqlite3 ends with the thread that uses it."""
    with contextlib.suppress(Exception):
        libpq = getattr(connection, "pgconn", None)
        if libpq is not None:
            libpq.finish()  # psycopg's own `close` may be a coroutine
        elif not isinstance(connection, sqlite3.Connection) and not inspect.iscoroutinefunction(connection.close):
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
        topics = topics_of(messages)
        if run is not None:
            meet(run, f"before the half of {topics}")
        original(self, pending, messages, source)
        if run is not None:
            meet(run, f"after the half of {topics}")

    return store_half


def _outcome(hooks: _Hooks, original: Callable[..., None]) -> Callable[..., None]:
    def committed(self: HalfSender, pending: Any) -> None:
        run = _run_of_sender(hooks, self)
        if run is None or not pending.prepared or self._mode == "outbox":
            return original(self, pending)
        topics = topics_of(pending.messages)
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
        with hooks.handling(self, lot):
            return original(self, *given)

    return handle


def _handle_async(hooks: _Hooks, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handle(self: AsyncConsumer, hand: Any, lot: Any) -> None:
        with hooks.handling(self, lot):
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
        place = place_of_handler(handler)
        meet(run, f"before {what}", place)
        answers = await original(self, settlings)
        meet(run, f"after {what}", place)
        return answers

    return settle


def _lease(item: Any) -> str:
    return str(item.receipt).rpartition(".")[0]


def _run_of_sender(hooks: _Hooks, sender: HalfSender) -> Watched | None:
    plan = getattr(sender._outgoing, "_plan", None)
    return None if plan is None else hooks.run_of(plan.url)


def topics_of(messages: Sequence[Any]) -> str:
    return ", ".join(sorted({message.topic for message in messages}))


_WRAPPED: tuple[Wrapped, ...] = (
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
