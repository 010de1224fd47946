"""TransactionProducer: a thin shell for threads over what runs on an event loop."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from notify.check.local import is_async
from notify.client.binding import Binding, existing, no_session, unscoped
from notify.client.callables import check_factory, check_made, check_transactional, refuse_coroutine
from notify.client.carrier import Carrier
from notify.client.choosing import Chooser, room_then_load
from notify.client.handles import TransactionHandle
from notify.client.inbox import PURGE_AFTER_SECONDS
from notify.client.login import Shown
from notify.client.rows import Mode
from notify.client.running import Plan
from notify.client.thread_producer import ThreadProducer
from notify.client.transactions import HALF_SECONDS
from notify.databases import check_engine
from notify.errors import BindingRefused
from notify.message import Message

P = ParamSpec("P")
R = TypeVar("R")


class TransactionProducer(ThreadProducer):
    """Sends messages with the transactions of a SQLAlchemy engine, from threads.

    `url`: the server; `group`: the producer group, whose instances share one database; `engine`: where the local
    transactions run; `mode`: `half` (server first, one round trip) or `outbox` (the table, moved by `notify relay`);
    `keep_messages`: in mode `half` the local rows keep the whole messages, too, so that `notify audit --repair` can
    publish again what a server loses with its disk.
    Times in seconds: `half_timeout` (0.01 to 3,600) to wait for the server; `check_after` until the server asks
    what became of a half, None: its own 5. `batching`: whether halves of several threads share a request;
    `answer_checks`: whether this process answers checks, from its construction on; `purge_after`: where it does,
    half_message rows of this group whose outcome the server has go after so long, a day at least; None: they stay.
    `token`, `tls`: what to show and to believe; None: what the environment says (`NOTIFY_TOKEN` or
    `NOTIFY_TOKEN_FILE`, `NOTIFY_CA`). `token` may be a function that gives the one to show now, without blocking:
    it is called again every 10 s, and when a server refuses the one before. `chooser` takes one of several servers
    (notify/client/choosing.py): by default one of the room `NOTIFY_ROOM`, and of these the less loaded are
    likelier. Raises InvalidRequest, and BindingRefused for an AsyncEngine.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Engine | None = None,
        mode: Mode = "half",
        keep_messages: bool = False,
        batching: bool = True,
        answer_checks: bool = True,
        half_timeout: float = HALF_SECONDS,
        check_after: float | None = None,
        purge_after: float | None = PURGE_AFTER_SECONDS,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
        chooser: Chooser = room_then_load,
    ) -> None:
        if engine is not None:
            check_engine(engine, is_async=False)
        if engine is not None and is_async(engine):
            raise BindingRefused("an AsyncEngine needs AsyncTransactionProducer: this one would block the event loop")
        plan = Plan(
            url=url,
            group=group,
            engine=engine,
            mode=mode,
            batching=batching,
            answer_checks=answer_checks,
            half_timeout=half_timeout,
            check_after=check_after,
            purge_after=purge_after,
            token=token,
            tls=tls,
            chooser=chooser,
        )
        super().__init__(plan)
        self._carrier = Carrier(self.outgoing, group, mode, keep_messages=keep_messages)
        self._binding = None if engine is None else Binding(engine, self._carrier)
        if engine is not None:
            self.outgoing.start()

    @property
    def binding(self) -> Binding:
        """The binding of messages to transactions of the engine. Raises BindingRefused where there is no engine."""
        return existing(self._binding)

    def send(self, session: Session | scoped_session[Any], message: Message) -> None:
        """Send a message with the session's transaction: it becomes a message if and only if that commits.

        Raises InvalidRequest for what is no message, BindingRefused for a session that cannot carry it, Closed after
        `close`. The message is read here; only a key that is a callable is asked later, at the commit. The commit
        raises TransactionRefused if the server did not take the half, and Backpressure if it takes none for now: then
        the transaction may be tried again.
        """
        self.binding.send_in_session(unscoped(session), message)

    @contextlib.contextmanager
    def transaction(self, target: Session | scoped_session[Any] | Connection) -> Iterator[TransactionHandle]:
        """Sends into a transaction. If the session or connection has none yet, it begins here and commits at the end;
        otherwise this joins it, and the commit stays with its owner."""
        if isinstance(target, Connection):
            with self._connection_transaction(target) as handle:
                yield handle
            return
        session: Session = unscoped(target)
        if not isinstance(session, Session):
            raise BindingRefused(no_session(session))
        handle = TransactionHandle(functools.partial(self.send, session))
        if session.in_transaction():
            yield handle
        else:
            with session.begin():
                yield handle

    @contextlib.contextmanager
    def _connection_transaction(self, connection: Connection) -> Iterator[TransactionHandle]:
        binding = self.binding
        handle = TransactionHandle(functools.partial(binding.send_in_connection, connection))
        if connection.in_transaction():
            yield handle  # its owner commits; SQLAlchemy tells nobody when that is over, so check-back resolves it
            return
        with connection.begin():
            yield handle
            bound = binding.bound(connection)
        if bound is not None:
            binding.committed(bound)

    def transactional(
        self, session_factory: Callable[[], Session]
    ) -> Callable[[Callable[Concatenate[Session, P], R]], Callable[P, R]]:
        """Decorator: opens a session, passes it first, commits it; an exception rolls back.

        Raises InvalidRequest for what makes no session, and for a coroutine function or one with a `yield`: it would
        run after the commit, or not.
        """
        check_factory(session_factory)

        def decorate(function: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
            check_transactional(function, is_async=False)

            @functools.wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> R:
                made = session_factory()
                check_made(made, is_async=False)
                with made as session, session.begin():
                    result = function(session, *args, **kwargs)
                    refuse_coroutine(result)
                    return result

            return call

        return decorate

    def _take_no_more(self) -> None:
        if self._binding is not None:
            self._binding.detach()
