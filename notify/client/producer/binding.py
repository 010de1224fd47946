"""Binding: ties messages to SQLAlchemy transactions, so that a message shares the fate of its transaction or savepoint.

HalfSender stores the half in the engine's `commit` event, the last moment before COMMIT: the flush is over, keys are
known, and an exception raised there stops the commit. A PendingMessages belongs to one root transaction. The listeners
compare it with the connection's current transaction, because a pooled connection serves many transactions.

Session events are full of traps: savepoints fire before_commit and after_commit, and close() fires no rollback. Three
uses remain. after_commit queues the outcome, after_transaction_end forgets the transaction, and before_commit and
after_flush refuse a session with several connections before the first of them commits.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine, ExceptionContext, TwoPhaseTransaction
from sqlalchemy.exc import InvalidRequestError, PendingRollbackError
from sqlalchemy.orm import Session

from notify.client.inbox.inbox import guard_connections
from notify.client.producer.half_sender import CLOSED, HalfSender, PendingMessages, check_driver, undone
from notify.client.producer.handles import FORGOTTEN
from notify.client.producer.sent import Sent
from notify.errors import BindingRefused, Closed, InvalidRequest, TransactionRefused
from notify.protocol.message import Message
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import begins_explicitly, has_undone, roll_back_driver, shown_url

INFO_KEY = "notify_transaction"
"""The key in a session's `info` for the binding and the PendingMessages."""

UNFINISHED_KEY = "notify_unfinished"
"""The key in a session's `info` for the asynchronous sends that have not ended, until the transaction ends."""

SEVERAL = (
    "this session commits to several databases, or in several transactions of one: in no order, and without a common "
    "outcome; send messages from a session whose work goes through one engine, and name the engines on which it only "
    "reads in the producer's readers=[…]"
)


def base_of(engine: Any) -> Any:
    """The original of an engine that `execution_options` made.

    Listeners of the original are called for every connection; those of an engine with options only for its own.
    """
    while hasattr(engine, "_proxied"):
        engine = engine._proxied
    return engine


def unscoped(session: Any) -> Any:
    """The current session of a scoped_session or async_scoped_session; any other session as it is."""
    return session() if hasattr(session, "registry") else session


def no_session(target: Any, expected: str = "Session") -> str:
    """The error text for an object that is not a session, with what to write instead."""
    name = type(target).__name__
    if isinstance(target, Connection) or hasattr(target, "sync_connection"):
        begin = "with" if isinstance(target, Connection) else "async with"
        write = f"{begin} producer.transaction(connection) as tx"
        return f"send takes a {expected}, not a {name}; write `{write}`, and tx.send(…)"
    hook = ""
    if isinstance(target, Session):
        hook = "; in a hook of the session, write await_only(producer.send(async_session(session), …))"
    return f"send takes the {expected} whose commit is to send the message; this is a {name}{hook}"


def existing(binding: Binding | None) -> Binding:
    """The binding of a producer. Raises BindingRefused if it is None."""
    if binding is None:
        raise BindingRefused("this producer has no engine: give engine= to bind messages to its transactions")
    return binding


_TWO_PHASE = (
    "two-phase {}s are not supported, since a later vote decides the message's outcome: commit in one phase where a "
    "message is sent"
)
_UNFLUSHED = (
    "nothing is committed: the session has changes that are not flushed, which the commit of its connection leaves "
    "out: call session.commit() instead"
)
_WRITES = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*(?:(?!\*/).)*+\*/)*+"
    r"(?:(?:INSERT|UPDATE|DELETE|MERGE|REPLACE|COPY|LOAD|CALL)\b"
    r"|WITH\b.*?(?:\b(?:INSERT|DELETE|MERGE)|(?<!\bFOR )(?<!\bKEY )\bUPDATE)\s)",
    re.IGNORECASE | re.DOTALL,
)
"""A statement in text that writes, whatever comments it begins with. What a function or procedure does is not seen."""


class Readers:
    """Engines on which the sessions of a producer only read, such as one of a replica. Their connections do not count
    when a session is to have one transaction; one that has written does."""

    def __init__(self, engine: Engine, readers: Sequence[Any]) -> None:
        """`engine`: the producer's. Raises InvalidRequest for a reader that is not an engine, or the producer's own."""
        self._engines: list[Engine] = [getattr(reader, "sync_engine", reader) for reader in readers]
        for reader in self._engines:
            if not isinstance(reader, Engine):
                raise InvalidRequest(f"readers takes engines, not a {type(reader).__name__}")
            if reader is engine:
                raise InvalidRequest(
                    "readers contains the producer's own engine: name only engines that sessions do not write to"
                )
        self._bases = {base_of(reader) for reader in self._engines} - {base_of(engine)}
        self._written: weakref.WeakKeyDictionary[Connection, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """The connections that have written, and the transaction in which they last did."""
        for reader in self._engines:
            with _listeners_lock:
                _statements_of(reader).readers += (self,)

    def close(self) -> None:
        for reader in self._engines:
            with _listeners_lock:
                statements = _statements_of(reader)
                statements.readers = tuple(each for each in statements.readers if each is not self)

    def note(self, connection: Connection, cursor: Any, statement: str, *given: Any) -> None:
        """Note a statement that a reader has executed."""
        context = given[1]
        is_dml = context is not None and (context.isinsert or context.isupdate or context.isdelete)
        root = connection.get_transaction() if is_dml or _WRITES.match(statement) else None
        if root is not None:
            self._written[connection] = weakref.ref(root)

    def are_of(self, engine: Any) -> bool:
        """Whether an engine is one of the readers, or made of one by `execution_options`."""
        return any(engine is reader for reader in self._engines) or base_of(engine) in self._bases

    def has_written(self, connection: Connection) -> bool:
        """Whether a reader's connection has written in its current transaction."""
        written = self._written.get(connection)
        return written is not None and written() is connection.get_transaction()

    def others(self, connections: Sequence[Connection]) -> list[Connection]:
        """The connections that are not a reader's. Raises BindingRefused if a reader has written."""
        if not self._engines:
            return list(connections)
        others = []
        for connection in connections:
            if not self.are_of(connection.engine):
                others.append(connection)
            elif self.has_written(connection):
                raise BindingRefused(
                    f"this session has written through {shown_url(connection.engine)}, which is one of the producer's "
                    "readers: what it wrote there and the message would not commit together: write through the "
                    "producer's engine"
                )
        return others


class _Statements:
    """The listener of all producers to the statements of one reader; never removed, as those of _Listeners."""

    def __init__(self, reader: Engine) -> None:
        self.readers: tuple[Readers, ...] = ()
        event.listen(reader, "after_cursor_execute", self.executed)

    def executed(self, *given: Any) -> None:
        for readers in self.readers:
            readers.note(*given)


class _Listeners:
    """The listeners of all producers on one engine, and of inboxes that are made later.

    They are never removed: a commit takes as long as its half, and raised "deque mutated during iteration" whenever
    another thread made or closed a producer meanwhile, or made an inbox.
    """

    def __init__(self, engine: Engine) -> None:
        self.bindings: tuple[Binding, ...] = ()
        guard_connections(engine)
        for name in ("commit", "rollback", "rollback_savepoint", "handle_error"):
            event.listen(engine, name, getattr(self, name))

    def commit(self, connection: Connection) -> None:
        for binding in self.bindings:
            binding._on_commit(connection)

    def rollback(self, connection: Connection) -> None:
        for binding in self.bindings:
            binding._on_rollback(connection)

    def rollback_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        for binding in self.bindings:
            binding._on_rollback_savepoint(connection, name, context)

    def handle_error(self, context: ExceptionContext) -> None:
        for binding in self.bindings:
            binding._on_error(context)


_listeners_lock = threading.Lock()


def listeners_of(base: Engine) -> _Listeners:
    """Those of an engine, of which they are an attribute, so that they go with it. Call it with `_listeners_lock`."""
    found: _Listeners | None = vars(base).get("notify_listeners")
    if found is None:
        found = vars(base)["notify_listeners"] = _Listeners(base)
    return found


def _statements_of(reader: Engine) -> _Statements:
    """Those of a reader, kept as `listeners_of` does. Call it with `_listeners_lock`."""
    found: _Statements | None = vars(reader).get("notify_statements")
    if found is None:
        found = vars(reader)["notify_statements"] = _Statements(reader)
    return found


class Binding:
    """One producer's part in the commits of its engine, and in sessions that use it."""

    def __init__(self, engine: Engine, half_sender: HalfSender, readers: Sequence[Any] = ()) -> None:
        """`readers`: engines on which the same sessions only read. Raises InvalidRequest."""
        self._engine = engine
        self._readers = Readers(engine, readers)
        self._half_sender = half_sender
        self._base: Engine = base_of(engine)
        self._lock = threading.Lock()
        """Keeps the beginning of a transaction apart from `detach`, which may run in another thread."""
        self._by_connection: weakref.WeakKeyDictionary[Connection, PendingMessages] = weakref.WeakKeyDictionary()
        with _listeners_lock:
            listeners_of(self._base).bindings += (self,)
            listen_to_sessions()

    def detach(self) -> None:
        """Take no more messages. The binding stays while a transaction has messages, because its commit must fail."""
        with self._lock:
            self._half_sender.is_closed = True
            if any(pending.is_active and not pending.prepared for pending in self._by_connection.values()):
                return
        with _listeners_lock:
            listeners = listeners_of(self._base)
            listeners.bindings = tuple(binding for binding in listeners.bindings if binding is not self)
        self._readers.close()

    # --- sending ----------------------------------------------------------------------------------------------

    def send_in_session(self, session: Session, message: Message) -> Sent:
        """Add a message to the session's transaction, in its current savepoint.

        Raises BindingRefused for a session that cannot carry it safely, InvalidRequest for an invalid message, Closed
        after `detach`.
        """
        if self._half_sender.is_closed:
            raise Closed(CLOSED)
        if not isinstance(session, Session):
            raise BindingRefused(no_session(session))
        if isinstance(session.bind, Connection):
            raise BindingRefused(
                "this session is bound to a Connection whose transaction may still roll back after the session's "
                "commit; bind the session to the engine, or use producer.transaction(connection)"
            )
        if session.twophase:
            raise BindingRefused(_TWO_PHASE.format("session"))
        packed = self._half_sender.pack(message)
        if not session.in_transaction():
            session.begin()
        connection = self._connection_of(session)
        carried = session.info.get(INFO_KEY)
        if carried is not None and carried[0] is not self and carried[1].is_active:
            raise BindingRefused("this session's transaction already carries messages of another producer")
        pending, number = self._add(connection, packed, message)
        pending.session = weakref.ref(session)
        session.info[INFO_KEY] = (self, pending)
        return Sent(pending, number, packed)

    def _connection_of(self, session: Session) -> Connection:
        """The session's only connection that is not a reader's, or a first one from the engine that it uses."""
        connections = self.writing(session)
        if len(connections) > 1:
            raise BindingRefused(SEVERAL)
        bind: Any = connections[0].engine if connections else session.bind or self._chosen(session)
        if self._readers.are_of(bind):
            bind = self._engine  # a session that is bound to a reader by default
        if base_of(bind) is not self._base:
            raise self._foreign(bind)
        try:
            # Called even if the session has a connection, so that a savepoint that has not used it yet includes it.
            return session.connection(bind_arguments={"bind": bind})
        except PendingRollbackError:
            raise
        except InvalidRequestError as error:
            raise BindingRefused(
                "this session is being committed, or has been, so that no message can join its transaction: send it "
                f"earlier, at the latest in the session's event before_commit. The error: {error}"
            ) from error

    def unfinished(self, session: Session) -> set[object]:
        """The session's asynchronous sends that have not ended, with which its transaction refuses to commit."""
        for connection in connections_of_session(session):
            if base_of(connection.engine) is self._base:  # its commit may have begun: a hook of the flush sends
                pending = self.pending(connection) or self._begin(connection)
                pending.session = weakref.ref(session)
        unfinished: set[object] = session.info.setdefault(UNFINISHED_KEY, set())
        return unfinished

    def writing(self, session: Session) -> list[Connection]:
        """The connections of the session's root transaction that are not a reader's. Raises BindingRefused if a reader
        has written."""
        return self._readers.others(connections_of_session(session))

    def _chosen(self, session: Session) -> Any:
        """The engine that a session without `bind` uses by default, if it is the producer's; else the producer's own.

        If the session's work then uses another engine, the session has two connections, and its commit is refused. A
        session may choose by a mapper or a statement, and fail in its own way without one, as a ShardedSession does.
        """
        try:
            bind = session.get_bind()
        except Exception:
            return self._engine
        return bind if base_of(bind) is self._base else self._engine

    def send_in_connection(self, connection: Connection, message: Message) -> Sent:
        """Add a message to the connection's transaction.

        Raises BindingRefused if the connection has no transaction or cannot carry the message, InvalidRequest for an
        invalid message, Closed after `detach`.
        """
        if not connection.in_transaction():
            raise BindingRefused("the connection has no transaction; use producer.transaction(connection)")
        packed = self._half_sender.pack(message)
        return Sent(*self._add(connection, packed, message), packed)

    def _add(self, connection: Connection, packed: PackedMessage, message: Message) -> tuple[PendingMessages, int]:
        """The messages of the connection's transaction, and the number of this one among them."""
        root = connection.get_transaction()
        pending = self._by_connection.get(connection)
        if pending is None or pending.root is not root:
            self._check_connection(connection)
            pending = self._begin(connection)
        if pending.undone is not None:
            raise undone(pending.undone)
        return pending, self._half_sender.add(pending, _open_savepoints(connection), packed, message)

    def _begin(self, connection: Connection) -> PendingMessages:
        root: Any = connection.get_transaction()
        pending = PendingMessages(weakref.ref(root))
        with self._lock:
            if not self._half_sender.is_closed:
                self._by_connection[connection] = pending
        return pending

    def _check_connection(self, connection: Connection) -> None:
        if base_of(connection.engine) is not self._base:
            raise self._foreign(connection.engine)
        transaction = connection.get_transaction()
        if transaction is None:
            raise BindingRefused(
                "this session's transaction was ended on its connection: end it with session.commit() or "
                "session.rollback()"
            )
        if isinstance(transaction, TwoPhaseTransaction):
            raise BindingRefused(_TWO_PHASE.format("transaction"))
        check_driver(connection)
        if connection.dialect.name == "sqlite" and not begins_explicitly(connection):
            raise BindingRefused(
                "Python's sqlite3 begins transactions late and keeps savepoints past a rollback; call "
                "notify.client.use_explicit_begin(engine) once after create_engine (if it was called, this transaction "
                "began before)"
            )

    def _foreign(self, engine: Any) -> BindingRefused:
        return BindingRefused(
            f"the session uses {shown_url(engine)}, the producer {shown_url(self._engine)} through an engine of its "
            "own: the half message's row must be in the same transaction; if the session only reads there, give the "
            "producer that engine in readers=[…]"
        )

    # --- savepoints -------------------------------------------------------------------------------------------

    def _on_rollback(self, connection: Connection) -> None:
        pending = self._by_connection.get(connection)
        if pending is not None:
            pending.drop_all()

    def _on_rollback_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        pending = self._by_connection.get(connection)
        if pending is not None:
            pending.drop_within(name)

    # --- errors of the database -------------------------------------------------------------------------------

    def _on_error(self, context: ExceptionContext) -> None:
        """Some errors roll back the whole transaction in the database, while SQLAlchemy believes that it continues.
        Code that catches such an error would commit the messages without the changes."""
        connection = context.connection
        if connection is None or connection.get_transaction() is None or connection.invalidated:
            return
        if (pending := self.pending(connection)) is not None and pending.prepared:
            pending.in_doubt = True  # a later listener's statement, whose error it may pass over
        if has_undone(connection.dialect.name, connection.connection, context.original_exception):
            (self.pending(connection) or self._begin(connection)).undone = context.original_exception

    # --- committing -------------------------------------------------------------------------------------------

    def _on_commit(self, connection: Connection) -> None:
        pending = self._by_connection.get(connection)
        if pending is None or pending.root is not connection.get_transaction():
            return
        if pending.failed is not None:
            raise TransactionRefused(
                f"an earlier commit of this transaction failed: {pending.failed}"
            ) from pending.failed
        session = None if pending.session is None else pending.session()
        is_forgotten = session is not None and bool(session.info.get(UNFINISHED_KEY))
        if pending.prepared or not (pending.sends or is_forgotten):
            return
        try:
            if is_forgotten:
                raise BindingRefused(FORGOTTEN)
            if pending.undone is not None:
                raise undone(pending.undone)
            if session is not None and len(self.writing(session)) > 1:
                raise BindingRefused(SEVERAL)
            if session is not None and (session.new or session.dirty or session.deleted):
                raise BindingRefused(_UNFLUSHED)
            self._half_sender.prepare(connection, pending)
        except BaseException as error:
            pending.failed = error
            roll_back_driver(connection)
            raise

    def pending(self, connection: Connection) -> PendingMessages | None:
        """The messages of the connection's current transaction."""
        pending = self._by_connection.get(connection)
        return pending if pending is not None and pending.root is connection.get_transaction() else None

    def committed(self, pending: PendingMessages) -> None:
        """Send the outcome COMMIT to the server, in the background. Call it once the database's COMMIT has returned."""
        self._half_sender.committed(pending)


def _open_savepoints(connection: Connection) -> tuple[str, ...]:
    """Names of the savepoints that are open, innermost first.

    They are read from the nested transactions, because the engine's `savepoint` event comes before the name is made.
    """
    names = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)
        nested = nested._previous_nested
    return tuple(names)


_listening = False


def listen_to_sessions() -> None:
    """Listen to the Session class, once in a process: listeners on instances cost twenty times as much. Call it with
    `_listeners_lock`."""
    global _listening
    if not _listening:
        event.listen(Session, "before_commit", _see_no_unfinished)
        event.listen(Session, "before_commit", _see_one_transaction)
        event.listen(Session, "after_flush", _see_one_transaction)
        # First: a hook of the service may raise, or take long, while the next transaction with the same key commits.
        event.listen(Session, "after_commit", _after_commit, insert=True)
        event.listen(Session, "after_rollback", _after_rollback)
        event.listen(Session, "after_transaction_end", _after_transaction_end)
        _listening = True


def connections_of_session(session: Session) -> list[Connection]:
    """The connections of the session's root transaction."""
    root = session.get_transaction()
    return [key for key in getattr(root, "_connections", None) or () if isinstance(key, Connection)]


def _see_no_unfinished(session: Session) -> None:
    """Refuse a commit before an asynchronous send has ended. The release of a savepoint fires this event, too."""
    if session.info.get(UNFINISHED_KEY) and not session.in_nested_transaction():
        raise BindingRefused(FORGOTTEN)


def _see_one_transaction(session: Session, context: Any = None) -> None:
    """Refuse a session with several connections before any of them commits, because they have no common outcome.

    The commit's own flush may begin another connection, so this runs after the flush too.
    """
    carried = session.info.get(INFO_KEY)
    if carried is None or not carried[1].sends:
        return
    try:
        if len(connections_of_session(session)) > 1 and len(carried[0].writing(session)) > 1:
            raise BindingRefused(SEVERAL)
    except BindingRefused as error:
        carried[1].failed = error
        raise


def _after_commit(session: Session) -> None:
    carried = session.info.get(INFO_KEY)
    if carried is not None:
        binding, pending = carried
        # A released savepoint fires this event too; only the COMMIT of the root transaction sets `prepared`.
        if pending.prepared:
            del session.info[INFO_KEY]
            binding.committed(pending)


def _after_rollback(session: Session) -> None:
    """A savepoint's rollback fires this event too, with the root still active; `close` does not fire it."""
    carried = session.info.get(INFO_KEY)
    if carried is not None and not carried[1].is_active:
        carried[1].rolled_back = True


def _after_transaction_end(session: Session, transaction: Any) -> None:
    if transaction.parent is not None:
        return
    session.info.pop(UNFINISHED_KEY, None)
    carried = session.info.pop(INFO_KEY, None)
    if carried is None:
        return
    pending: PendingMessages = carried[1]
    # If an exception ends the session, the exception says enough.
    if sys.exc_info()[0] is None:
        pending.warn_of_dropped()
    pending.session = None
