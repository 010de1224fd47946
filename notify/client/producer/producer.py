"""TransactionProducer: the producer for threads and SQLAlchemy; and the base that it shares with Django's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar, Unpack

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from notify.check.listener import CheckMessageListener
from notify.check.local import is_async
from notify.client.producer.binding import Binding, existing, no_session, unscoped
from notify.client.producer.half_sender import HalfSender
from notify.client.producer.handles import SyncPrepared, TransactionHandle
from notify.client.producer.options import (
    FLUSH_SECONDS,
    ProducerOptions,
    ProducerPlan,
    check_check_after,
    check_flush,
    takes_options,
)
from notify.client.producer.outgoing import ThreadOutgoing
from notify.client.producer.packing import pack, pack_all, pack_schedule
from notify.client.producer.sent import Sent
from notify.client.producer.transactional import check_factory, check_made, check_transactional, refuse_coroutine
from notify.client.producer.withdrawals import Target, Withdrawal, cancellation, replacement, withdrawing
from notify.client.threads.loop import refuse_to_pickle
from notify.errors import BindingRefused
from notify.protocol.message import Message
from notify.runtime import tracing
from notify.runtime.databases import check_engine

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

P = ParamSpec("P")
R = TypeVar("R")


class ThreadProducer:
    """Base of the producers for threads: a thin shell over code that runs on an event loop."""

    _half_sender: HalfSender

    def __init__(self, plan: ProducerPlan) -> None:
        self.url = plan.url
        self.group = plan.group
        self.mode = plan.mode
        self._plan = plan
        self.outgoing = ThreadOutgoing(plan)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_to_pickle(self)

    @property
    def instance(self) -> str:
        """The name of this process among the instances of its group."""
        return self._plan.instance

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        """Let a listener answer the checks of its topics, instead of the local table. Raises InvalidRequest."""
        self._plan.add_listener(listener)
        self.outgoing.answer_checks()

    def publish(self, message: Message) -> str:
        """Send a message without a transaction and return its id. The message is durable when this returns.

        Raises InvalidRequest, Unavailable, IdInUse, and Closed after `close`.
        """
        self.outgoing.start()
        packed = pack(message, self._plan.bodies)
        self.outgoing.upload([packed])
        with tracing.sending([packed]):
            return self.outgoing.publish(packed)

    def schedule(
        self,
        name: str,
        message: Message,
        *,
        cron: str | None = None,
        every: float | timedelta | None = None,
        zone: str | ZoneInfo = "UTC",
        catch_up: str = "last",
        catch_up_most: int = 100,
    ) -> list[datetime]:
        """Send a message repeatedly: at the instants of a cron expression in a time zone, or every so many
        seconds. Returns the next instants.

        `name`: of the schedule; declaring the same again changes nothing, and anything else replaces it. `cron`: five
        fields, such as "0 7 * * 1-5"; `zone`: its IANA time zone. `every`: seconds (1 to 31,622,400) or a timedelta,
        counted from 1970-01-01T00:00:00Z. `catch_up`: which of the instants are sent late that no server could send
        within 60 s: the last one of them, if nothing else is due (`last`), none (`skip`), or the last `catch_up_most`
        (1 to 1,000) of them (`all`). The message has at most 64 KiB and no delay; a callable key is called now. The
        message's id is made from the schedule and the instant, and its headers name both.

        Raises InvalidRequest, Conflict if somebody else changes the schedule at the same moment, Unavailable, and
        Closed after `close`.
        """
        return self.outgoing.schedule(name, pack_schedule(message, cron, every, zone, catch_up, catch_up_most))

    def unschedule(self, name: str) -> bool:
        """Delete a schedule; whether there was one. Raises InvalidRequest, Unavailable, and Closed after `close`."""
        return self.outgoing.unschedule(name)

    def withdrawal(self, message_id: str) -> Withdrawal:
        """A withdrawal that was sent earlier, by its id: its `outcome` says what became of it."""
        return Withdrawal(None, 0, None, self.outgoing.outcome_of_withdrawal, message_id)

    def prepare(self, messages: Sequence[Message], *, check_after: float | None = None) -> SyncPrepared:
        """Store a half for a transaction that is not in a database; end it with commit() or rollback().

        After `check_after` seconds (None: the producer's setting) the server asks for the outcome, and a listener
        answers. Raises InvalidRequest, TransactionRefused, Unavailable, and Closed after `close`.
        """
        if check_after is not None:
            check_check_after(check_after)
        packed = pack_all(messages, self._plan.bodies)
        self.outgoing.upload(packed)
        with tracing.sending(packed):
            item = self.outgoing.prepare(packed, check_after)
        return SyncPrepared(self.outgoing.resolve, item.id, item.shard)

    def flush(self, timeout: float = FLUSH_SECONDS) -> list[str]:
        """Wait at most `timeout` seconds until the server has every outcome that is on its way, such as before the
        platform freezes the process, or at the end of a script.

        Returns the ids of the committed or rolled-back transactions whose outcome it does not have then; a check finds
        these later. An outcome that could not be sent earlier is sent again. Raises InvalidRequest for a timeout that
        is not a number of seconds.
        """
        return self.outgoing.flush(check_flush(timeout))

    def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections.

        A transaction that has messages and has not committed yet cannot commit any more: its commit raises
        TransactionRefused.
        """
        if self.outgoing.is_closed:
            return
        self._take_no_more()
        self.outgoing.close()

    def _take_no_more(self) -> None:
        """Refuse messages and commits from now on."""
        self._half_sender.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TransactionProducer(ThreadProducer):
    """Sends messages with the transactions of a SQLAlchemy engine, from threads.

    `url`: the server; `group`: the producer group, whose instances share one database; `engine`: where the local
    transactions run; `readers`: engines on which the same sessions only read, such as one of a replica; a commit is
    refused if the session wrote there. `schema`: the schema (on MySQL and MariaDB the database) of Notify's tables;
    None: where each transaction's connection finds them, by its `schema_translate_map`, search_path or current
    database. `mode`: `half`, the default (a half message is stored with the server before the commit), `outbox` (the
    messages are rows of a table, which a relay or bridge moves to the server), or `auto` (as `half`; if the server does
    not store the half within `half_timeout`, the transaction commits with the messages in its rows, which a producer of
    the group in mode `auto` sends once the server is back). `rows`: False, in mode `outbox` on PostgreSQL: no row is
    written; the messages stand in the database's log only, from which `notify bridge` moves them. A commit is refused
    unless a bridge has a slot there; what a lost slot held is lost. `keep_messages`: in mode `half` the local rows keep
    the whole messages too, so that `notify audit --repair` can publish messages again that a server lost with its disk.
    `half_timeout`: seconds to wait for the server to store a half (0.01 to 3,600; default 3). `check_after`: seconds
    until the server asks for the outcome of a half; None: the server's default of 5. `batching`: whether halves of
    several threads share a request (default True). `answer_checks`: whether this process answers checks, from its
    construction on (default True). `purge_after`: seconds, at least a day (default 30 days), after which a process that
    answers checks deletes the group's rows in half_message whose outcome the server knows; None: the rows stay.
    `token`: the token to send; `tls`: the TLS context that verifies the server; None: both come from the environment
    (`NOTIFY_TOKEN` or `NOTIFY_TOKEN_FILE`, `NOTIFY_CA`). `token` may be a function that returns the current token
    without blocking: it is called every 10 s, and when a server refuses the previous token. `chooser` picks one of
    several servers (notify/client/transport/servers.py): by default a server in the room `NOTIFY_ROOM`, preferring less
    loaded ones. `wait_for_outcome`: a commit returns once the server has its outcome too, or after `half_timeout` with
    a line in the log, for processes that are frozen or killed right after a commit. `store`: the URL of an object store
    (`s3://bucket/prefix`, `file:///directory`) that gets each body of more than `store_above` bytes (0 to 1,048,576;
    default 262,144) just before the half or the row is written, within `store_timeout` seconds (0.1 to 300; default
    30); the message carries a reference, which consumers with the same `store` follow. `compress_above`: bodies of more
    than so many bytes (0 to 1,048,576) are compressed with Zstandard if that makes them smaller; None: none is. Raises
    InvalidRequest, and BindingRefused for an AsyncEngine.
    """

    @takes_options
    def __init__(
        self,
        url: str,
        *,
        group: str,
        engine: Engine | None = None,
        readers: Sequence[Engine] = (),
        **options: Unpack[ProducerOptions],
    ) -> None:
        if engine is not None:
            check_engine(engine, is_async=False)
        if engine is not None and is_async(engine):
            raise BindingRefused("an AsyncEngine needs AsyncTransactionProducer: this one would block the event loop")
        super().__init__(ProducerPlan(url=url, group=group, engine=engine, **options))
        self._half_sender = HalfSender(self.outgoing, self._plan)
        self._binding = None if engine is None else Binding(engine, self._half_sender, readers)
        if engine is not None:
            self.outgoing.start_ahead()

    @property
    def binding(self) -> Binding:
        """The binding of messages to transactions of the engine. Raises BindingRefused if there is no engine."""
        return existing(self._binding)

    def send(self, session: Session | scoped_session[Any], message: Message) -> Sent:
        """Send a message with the session's transaction: consumers get it if and only if the transaction commits. What
        is returned has the message's id.

        Raises InvalidRequest for an invalid message, BindingRefused for a session that cannot carry it, Closed after
        `close`. The message is encoded now; only a callable key is called later, at the commit. The commit raises
        TransactionRefused if the server refused the half, and Backpressure if the server accepts no halves at the
        moment: then the transaction may be retried.
        """
        return self.binding.send_in_session(unscoped(session), message)

    def cancel(
        self,
        session: Session | scoped_session[Any],
        message: Target,
        *,
        topic: str | None = None,
        key: str | int | None = None,
    ) -> Withdrawal:
        """Cancel a delayed message with the session's transaction: if that commits before the message is due, nobody
        gets the message; if it rolls back, nothing is cancelled.

        `message`: its id, or what `send` returned; `topic`, `key`: see `cancellation`. The `outcome` of what is
        returned says after the commit whether it was in time. Raises what `send` raises.
        """
        return withdrawing(
            self.send(session, cancellation(message, topic=topic, key=key)), self.outgoing.outcome_of_withdrawal
        )

    def replace(self, session: Session | scoped_session[Any], message: Target, by: Message) -> Withdrawal:
        """Replace a delayed message with the session's transaction: if that commits before the message is due, `by`
        is delivered in its place, after its own delay; otherwise `by` is not delivered.

        The `outcome` of what is returned says after the commit whether it was in time. Raises what `send` raises.
        """
        return withdrawing(self.send(session, replacement(message, by)), self.outgoing.outcome_of_withdrawal)

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
        handle = TransactionHandle(functools.partial(self.send, session), self.outgoing.outcome_of_withdrawal)
        if session.in_transaction():
            yield handle
        else:
            with session.begin():
                yield handle

    @contextlib.contextmanager
    def _connection_transaction(self, connection: Connection) -> Iterator[TransactionHandle]:
        binding = self.binding
        handle = TransactionHandle(
            functools.partial(binding.send_in_connection, connection), self.outgoing.outcome_of_withdrawal
        )
        if connection.in_transaction():
            yield handle  # the owner commits; SQLAlchemy has no event after a COMMIT, so check-back finds the outcome
            return
        with connection.begin():
            yield handle
            pending = binding.pending(connection)
        if pending is not None:
            binding.committed(pending)

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
