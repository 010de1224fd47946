"""Binding messages to database transactions: what is sent in a transaction shares its fate, savepoints included.

The work happens in the engine's `commit` event, the last moment before COMMIT: the flush is over, keys are known,
and what raises there stops the commit. The half goes to the server, then its rows into the same transaction. A
state belongs to one root transaction, and the guard proceeds only for that one: a pooled connection outlives it.

SQLAlchemy's session events are full of traps (savepoints fire before_commit and after_commit, close() fires no
rollback); the few used here are after_commit, to queue the outcome, and after_transaction_end, to let go.
"""

from __future__ import annotations

import weakref
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler

from notify import ids, tracing
from notify.check.question import read_source
from notify.client.table import half_message
from notify.client.transactions import pack
from notify.databases import database_now
from notify.errors import Backpressure, BindingRefused, InvalidRequest, NotifyError, TransactionRefused
from notify.message import Message
from notify.wire import Item, PackedMessage

INFO_KEY = "notify_transaction"


class Sender(Protocol):
    """What the binding needs of its producer; both producers have it."""

    group: str
    mode: str
    engine: Engine

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half and wait; raises NotifyError."""
        ...

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome; never raises, never blocks."""
        ...


class BoundTransaction:
    """The messages of one root transaction."""

    __slots__ = ("failed", "id", "prepared", "root", "sends", "shard")

    def __init__(self, root: Any) -> None:
        self.root = root
        self.sends: list[tuple[tuple[str, ...], Message]] = []
        """Each message with the savepoints it was sent within."""
        self.failed: BaseException | None = None
        self.prepared = False
        self.id = ""
        self.shard: str | None = None


class Binding:
    """One producer's listeners on its engine, and on sessions that use it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._engine = sender.engine
        self._by_connection: weakref.WeakKeyDictionary[Connection, BoundTransaction] = weakref.WeakKeyDictionary()
        self._source = ""
        self._mark: SQLCompiler | None = None
        event.listen(self._engine, "commit", self._on_commit)
        event.listen(self._engine, "rollback", self._on_rollback)
        event.listen(self._engine, "prepare_twophase", self._on_prepare_twophase)
        event.listen(self._engine, "rollback_savepoint", self._on_rollback_savepoint)
        _listen_to_sessions()

    def detach(self) -> None:
        """Remove the engine's listeners."""
        for name, listener in (
            ("commit", self._on_commit),
            ("rollback", self._on_rollback),
            ("prepare_twophase", self._on_prepare_twophase),
            ("rollback_savepoint", self._on_rollback_savepoint),
        ):
            event.remove(self._engine, name, listener)

    # --- sending ----------------------------------------------------------------------------------------------

    def send_in_session(self, session: Session, message: Message) -> None:
        """Add a message to the session's transaction, in its current savepoint.

        Raises BindingRefused for a session that cannot carry it safely.
        """
        if isinstance(session.bind, Connection):
            raise BindingRefused(
                "this session is bound to a Connection whose transaction may still roll back after the session's "
                "commit; bind the session to the engine, or use producer.transaction(connection)"
            )
        if session.twophase:
            raise BindingRefused("two-phase sessions are not supported: the message's outcome would not be the vote's")
        if not session.in_transaction():
            session.begin()
        connection = session.connection(bind_arguments={"bind": session.bind or self._engine})
        bound = self._bind(connection, message)
        known = session.info.get(INFO_KEY)
        if known is not None and known[1] is not bound and known[1].root.is_active:
            raise BindingRefused("this session's transaction already carries messages of another producer")
        session.info[INFO_KEY] = (self, bound)

    def send_in_connection(self, connection: Connection, message: Message) -> BoundTransaction:
        """Add a message to the connection's transaction. Raises BindingRefused if it has none."""
        if not connection.in_transaction():
            raise BindingRefused("the connection has no transaction; use producer.transaction(connection)")
        return self._bind(connection, message)

    def _bind(self, connection: Connection, message: Message) -> BoundTransaction:
        root = connection.get_transaction()
        bound = self._by_connection.get(connection)
        if bound is None or bound.root is not root:
            self._check_connection(connection)
            bound = self._by_connection[connection] = BoundTransaction(root)
        if bound.prepared:
            raise BindingRefused("the transaction is being committed: no more messages can join it")
        bound.sends.append((_open_savepoints(connection), message))
        return bound

    def _check_connection(self, connection: Connection) -> None:
        if connection.engine.pool is not self._engine.pool:
            raise BindingRefused(
                f"the session uses {connection.engine.url.render_as_string()}, the producer "
                f"{self._engine.url.render_as_string()}: the half message's row must be in the same transaction"
            )
        isolation = connection.get_execution_options().get("isolation_level") or getattr(
            connection.dialect, "_on_connect_isolation_level", None
        )
        if isolation == "AUTOCOMMIT":
            raise BindingRefused("the engine is in AUTOCOMMIT: there is no transaction that a message could join")
        if connection.dialect.name == "sqlite":
            self._check_sqlite(connection)

    def _check_sqlite(self, connection: Connection) -> None:
        raw = connection.connection.driver_connection
        if getattr(raw, "isolation_level", "") is not None or not getattr(raw, "in_transaction", False):
            raise BindingRefused(
                "Python's sqlite3 begins transactions late and keeps savepoints past a rollback; call "
                "notify.client.use_explicit_begin(engine) once after create_engine"
            )

    # --- savepoints -------------------------------------------------------------------------------------------

    def _on_rollback(self, connection: Connection) -> None:
        bound = self._by_connection.get(connection)
        if bound is not None:
            bound.sends.clear()

    def _on_rollback_savepoint(self, connection: Connection, name: str, context: Any) -> None:
        bound = self._by_connection.get(connection)
        if bound is not None:
            bound.sends = [send for send in bound.sends if name not in send[0]]

    # --- committing -------------------------------------------------------------------------------------------

    def _on_commit(self, connection: Connection) -> None:
        bound = self._by_connection.get(connection)
        if bound is None or bound.root is not connection.get_transaction():
            return
        if bound.failed is not None:
            raise TransactionRefused(f"an earlier commit of this transaction failed: {bound.failed}") from bound.failed
        if bound.prepared or not bound.sends:
            return
        try:
            self._prepare(connection, bound)
        except BaseException as error:
            bound.failed = error
            # SQLAlchemy takes the transaction for ended now and would give the connection back to the pool without
            # a rollback: its next user's COMMIT would commit this one's changes.
            _roll_back(connection)
            raise

    def _on_prepare_twophase(self, connection: Connection, xid: Any) -> None:
        if connection in self._by_connection:
            raise BindingRefused("two-phase transactions are not supported")

    def _prepare(self, connection: Connection, bound: BoundTransaction) -> None:
        """Half to the server, rows into the transaction. Whatever raises here stops the commit."""
        messages = [pack(message) for _, message in bound.sends]
        bound.id = ids.to_text(ids.new_id())
        if not self._source:
            self._source = read_source(connection)[0]
        if self._sender.mode == "outbox":
            with tracing.sending(messages):
                pass  # the row carries the context; a bridge or relay moves it
        else:
            try:
                with tracing.sending(messages):
                    item = self._sender.store_half(bound.id, messages, self._source)
            except NotifyError as error:
                detail = f"the half message was not stored, so nothing is committed: {error}"
                if isinstance(error, Backpressure):
                    raise Backpressure(detail, error.code, error.retry_after) from error
                refused = TransactionRefused(detail)
                refused.code, refused.retryable = error.code, error.retryable
                raise refused from error
            bound.shard = item.shard
        try:
            self._insert(connection, bound, messages)
        except BaseException:
            # COMMIT is never issued after this: the half cannot come true any more.
            if bound.shard is not None:
                self._sender.outcome_soon(bound.id, bound.shard, "ROLLBACK")
            raise
        bound.prepared = True

    def _insert(self, connection: Connection, bound: BoundTransaction, messages: list[PackedMessage]) -> None:
        fixed: dict[str, Any] = {
            "transaction_id": bound.id,
            "producer_group": self._sender.group,
            "mode": self._sender.mode,
            "state": "COMMITTED",
            "shards": bound.shard or "",
        }
        if self._sender.mode == "half":
            rows = [
                fixed | {"message_no": number, "topic": m.topic, "key": m.key, "tag": m.tag, "relayed": 1}
                for number, m in enumerate(messages)
            ]
            self._insert_marks(connection, rows)
            return
        rows = [
            fixed
            | {
                "message_no": number,
                "topic": m.topic,
                "key": m.key,
                "tag": m.tag,
                "headers": encode_headers(m.headers),
                "body": m.body,
                "delay": m.delay,
                "deliver_at": naive_utc(m.deliver_at),
                "ttl": m.ttl,
                "relayed": 0,
            }
            for number, m in enumerate(messages)
        ]
        connection.execute(_INSERT, rows)

    def _insert_marks(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Rows without bodies: the server has those. Text and numbers only, so that no type has to be converted,
        and the statement, compiled once, goes to the driver as it is: half the CPU time of `execute`."""
        if connection.get_execution_options().get("schema_translate_map"):
            connection.execute(_INSERT, rows)
            return
        if self._mark is None:
            self._mark = _INSERT.compile(dialect=connection.dialect, column_keys=list(rows[0]))
        order = self._mark.positiontup
        given: list[Any] = rows if order is None else [tuple([row[name] for name in order]) for row in rows]
        connection.exec_driver_sql(self._mark.string, given[0] if len(given) == 1 else given)

    def bound(self, connection: Connection) -> BoundTransaction | None:
        """The messages of the connection's current transaction."""
        bound = self._by_connection.get(connection)
        return bound if bound is not None and bound.root is connection.get_transaction() else None

    def committed(self, bound: BoundTransaction) -> None:
        """The transaction's COMMIT has returned: tell the server, in the background."""
        if bound.prepared and self._sender.mode == "half":
            self._sender.outcome_soon(bound.id, bound.shard, "COMMIT")


def _roll_back(connection: Connection) -> None:
    """End the driver's transaction. A connection that is lost, or fails at this, is not used again."""
    if connection.invalidated:
        return
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:
        connection.invalidate()


def _open_savepoints(connection: Connection) -> tuple[str, ...]:
    """Names of the savepoints that are open, innermost first.

    Read off the nested transactions themselves: the engine's `savepoint` event comes before the name is made.
    """
    names = []
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)
        nested = nested._previous_nested
    return tuple(names)


_INSERT = half_message.insert().values(created_at=database_now())


def encode_headers(headers: dict[str, str] | None) -> str | None:
    """Headers as the column holds them."""
    return msgspec.json.encode(headers).decode() if headers else None


def naive_utc(moment: datetime | None) -> datetime | None:
    """An instant as the column holds it: UTC without a zone. Raises InvalidRequest if it names no zone."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidRequest("deliver_at needs its time zone, for example datetime.now(UTC)")
    return moment.astimezone(UTC).replace(tzinfo=None)


# --- sessions -------------------------------------------------------------------------------------------------

_listening = False


def _listen_to_sessions() -> None:
    """Once a process, on the Session class: listeners on instances cost twenty times as much."""
    global _listening
    if not _listening:
        _listening = True
        event.listen(Session, "before_commit", _before_commit)
        event.listen(Session, "after_commit", _after_commit)
        event.listen(Session, "after_transaction_end", _after_transaction_end)


def _before_commit(session: Session) -> None:
    """Several databases in one commit have no common outcome: refuse before any of them commits."""
    found = session.info.get(INFO_KEY)
    if found is None or not found[1].sends:
        return
    root = session.get_transaction()
    connections = {key for key in getattr(root, "_connections", ()) if isinstance(key, Connection)}
    if len({id(c.engine.pool) for c in connections}) > 1:
        found[1].failed = BindingRefused(
            "this session commits to several databases, in no order and without a common outcome; send messages from "
            "a session with one engine"
        )
        raise found[1].failed


def _after_commit(session: Session) -> None:
    found = session.info.get(INFO_KEY)
    if found is not None:
        binding, bound = found
        # A released savepoint comes here too; only the guard of the root's COMMIT prepares.
        if bound.prepared:
            del session.info[INFO_KEY]
            binding.committed(bound)


def _after_transaction_end(session: Session, transaction: Any) -> None:
    if transaction.parent is None:
        session.info.pop(INFO_KEY, None)
