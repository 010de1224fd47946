"""HOOKS gets the steps of a process: see Step.

A step is a statement of the database, a COMMIT, or a call of the SDK to the server, each with the line of the service's
own code that made it. The SDK's work in the background, such as its long polls, has no such line and no steps; but what
a handler's message or a relay goes through has the line of the handler, or the one that started the relay.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import socket
import sqlite3
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import event

from notify.client.consumer.consumer import AsyncConsumer, Consumer
from notify.client.consumer.session import Settler
from notify.client.handling.hand import Call
from notify.client.handling.handlers import Handler
from notify.client.handling.runs import Run
from notify.client.producer.async_producer import AsyncTransactionProducer
from notify.client.producer.half_sender import HalfSender
from notify.client.producer.outgoing import LoopOutgoing, ThreadOutgoing
from notify.testing.step import (
    AFTER_COMMIT,
    AT_COMMIT,
    LOST_COMMIT,
    REFUSED_COMMIT,
    Watched,
    at_place,
    commit_error,
    executing,
    is_of_service,
    meet,
    place_of_handler,
)

if TYPE_CHECKING:
    from notify.testing.django_steps import DjangoProcesses


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
        if run is None and self._live is not None and is_of_service():
            run = self._owners[used] = self._live
        return run

    def _run_of_dialect(self, dialect: Any) -> Watched | None:
        run = self.owner_of(dialect)
        if run is not None:
            self._wrap_commit(dialect, run)
        return run

    @contextlib.contextmanager
    def handling(self, part: AsyncConsumer | Consumer, leased: Run) -> Iterator[None]:
        """A consumer calls a handler for messages of this lease, and perhaps of others, within this context."""
        run, handler = self._parts.get(part) or self.run_of(part.url), leased.handler
        if run is None or handler is None:
            yield
            return
        self.handlers[leased.lease] = handler
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


def _host(url: str) -> str:
    return urlsplit(url.partition(",")[0]).netloc


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
    own_socket = _socket_of(connection)
    if own_socket is None:
        connection.close()
        return
    with socket.socket(fileno=os.dup(own_socket.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _socket_of(connection: Any) -> Any:
    """The object that has the file descriptor of a driver's connection; None if the driver does not show it."""
    if type(connection).__module__.startswith("asyncpg"):  # its `close` is a coroutine
        return connection._transport.get_extra_info("socket")
    own = getattr(connection, "_sock", None)  # PyMySQL's
    return own or (connection if hasattr(connection, "fileno") else None)


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
    """For the methods of consumers that call a handler: one of the arguments is a Call, or a list of messages."""

    def handle(self: Any, *given: Any) -> Any:
        leased = next(
            argument.run if isinstance(argument, Call) else argument[0][0]
            for argument in given
            if isinstance(argument, Call | list)
        )
        with hooks.handling(self, leased):
            return original(self, *given)

    return handle


def _handle_async(hooks: _Hooks, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def handle(self: AsyncConsumer, hand: Any, lot: Any) -> None:
        with hooks.handling(self, lot[0][0]):
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
    (Consumer, "_handle_batch", _handle),
    (AsyncConsumer, "_begin", _handle),
    (AsyncConsumer, "_handle_batch", _handle_async),
    (Settler, "_settle", _settle),
)
