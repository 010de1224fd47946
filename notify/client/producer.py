"""TransactionProducer: the producer for threads and SQLAlchemy, a thin shell over code that runs on an event loop."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from notify.check.local import is_async
from notify.check.sources import Sources
from notify.client.binding import Binding, existing, no_session, unscoped
from notify.client.callables import check_factory, check_made, check_transactional, refuse_coroutine
from notify.client.choosing import Chooser, room_then_load
from notify.client.half_sender import HalfSender
from notify.client.handles import TransactionHandle
from notify.client.inbox import PURGE_AFTER_SECONDS
from notify.client.login import Shown
from notify.client.places import Places
from notify.client.rows import Mode
from notify.client.running import Plan
from notify.client.table import SENDS
from notify.client.thread_producer import ThreadProducer
from notify.client.transactions import HALF_SECONDS
from notify.errors import BindingRefused
from notify.protocol.message import Message
from notify.runtime.databases import check_engine

P = ParamSpec("P")
R = TypeVar("R")


class TransactionProducer(ThreadProducer):
    """Sends messages with the transactions of a SQLAlchemy engine, from threads.

    `url`: the server; `group`: the producer group, whose instances share one database; `engine`: where the local
    transactions run; `schema`: the schema (on MySQL and MariaDB the database) of Notify's tables; None: where each
    transaction's connection finds them, by its `schema_translate_map`, search_path or current database. `mode`: `half`
    (a half message is stored with the server before the commit) or `outbox` (the messages are rows of a table, which
    `notify relay` moves to the server). `keep_messages`: in mode `half` the local rows keep the whole messages too, so
    that `notify audit --repair` can publish messages again that a server lost with its disk.
    `half_timeout`: seconds to wait for the server to store a half (0.01 to 3,600). `check_after`: seconds until the
    server asks for the outcome of a half; None: the server's default of 5. `batching`: whether halves of several
    threads share a request. `answer_checks`: whether this process answers checks, from its construction on.
    `purge_after`: seconds, at least a day, after which a process that answers checks deletes the group's rows in
    half_message whose outcome the server knows; None: the rows stay.
    `token`: the token to send; `tls`: the TLS context that verifies the server; None: both come from the environment
    (`NOTIFY_TOKEN` or `NOTIFY_TOKEN_FILE`, `NOTIFY_CA`). `token` may be a function that returns the current token
    without blocking: it is called every 10 s, and when a server refuses the previous token. `chooser` picks one of
    several servers (notify/client/choosing.py): by default a server in the room `NOTIFY_ROOM`, preferring less loaded
    ones. `wait_for_outcome`: a commit returns once the server has its outcome too, or after `half_timeout` with a line
    in the log, for processes that are frozen or killed right after a commit. `readers`: engines on which the same
    sessions only read, such as one of a replica; a commit is refused if the session wrote there. Raises InvalidRequest,
    and BindingRefused for an AsyncEngine.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Engine | None = None,
        schema: str | None = None,
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
        wait_for_outcome: bool = False,
        readers: Sequence[Engine] = (),
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
            sources=Sources(schema),
            wait_for_outcome=wait_for_outcome,
        )
        super().__init__(plan)
        self._carrier = HalfSender(
            self.outgoing, group, mode, Places(plan.sources, SENDS[mode]), keep_messages=keep_messages
        )
        self._binding = None if engine is None else Binding(engine, self._carrier, readers)
        if engine is not None:
            self.outgoing.start_ahead()

    @property
    def binding(self) -> Binding:
        """The binding of messages to transactions of the engine. Raises BindingRefused if there is no engine."""
        return existing(self._binding)

    def send(self, session: Session | scoped_session[Any], message: Message) -> None:
        """Send a message with the session's transaction: consumers get it if and only if the transaction commits.

        Raises InvalidRequest for an invalid message, BindingRefused for a session that cannot carry it, Closed after
        `close`. The message is encoded now; only a callable key is called later, at the commit. The commit raises
        TransactionRefused if the server refused the half, and Backpressure if the server accepts no halves at the
        moment: then the transaction may be retried.
        """
        self.binding.send_in_session(unscoped(session), message)

    @contextlib.contextmanager
    def transaction(self, target: Session | scoped_session[Any] | Connection) -> Iterator[TransactionHandle]:
        """Send messages within a transaction. If the session or connection has no transaction yet, one begins here and
        commits at the end of the block; otherwise the block joins the open transaction, which its owner commits."""
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
            yield handle  # the owner commits; SQLAlchemy has no event after a COMMIT, so check-back finds the outcome
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

        Raises InvalidRequest if `session_factory` makes no session, and for a coroutine function or a generator: its
        body would run after the commit, or never.
        """
        check_factory(session_factory)

        def decorate(function: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
            check_transactional(function, is_async=False)

            @functools.wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> R:
                session_context = session_factory()
                check_made(session_context, is_async=False)
                with session_context as session, session.begin():
                    result = function(session, *args, **kwargs)
                    refuse_coroutine(result)
                    return result

            return call

        return decorate

    def _take_no_more(self) -> None:
        if self._binding is not None:
            self._binding.detach()
