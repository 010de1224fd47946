"""BoundTransaction: the messages that one transaction carries; and the listeners to SQLAlchemy's session events.

Session events are full of traps: savepoints fire before_commit and after_commit, and close() fires no rollback. Three
uses remain. after_commit queues the outcome, after_transaction_end forgets the transaction, and before_commit and
after_flush refuse a session with several connections before the first of them commits.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from notify.errors import BindingRefused
from notify.protocol.message import Message
from notify.protocol.wire import PackedMessage

log = logging.getLogger("notify.client")

INFO_KEY = "notify_transaction"
"""The key in a session's `info` for the binding and the PendingMessages."""

SEVERAL = (
    "this session commits to several databases, or in several transactions of one: in no order, and without a common "
    "outcome; send messages from a session whose work goes through one engine, and name the engines on which it only "
    "reads in the producer's readers=[…]"
)


def undone(error: BaseException) -> BindingRefused:
    """The error for a transaction that the database itself has rolled back."""
    return BindingRefused(
        "nothing is committed: the database has rolled back the whole transaction with an error that was caught, so "
        f"that what came before it is gone: roll back, and repeat all of it. The error: {error}"
    )


class PendingMessages:
    """The messages of one root transaction."""

    __slots__ = ("_root", "dropped", "failed", "id", "prepared", "rolled_back", "sends", "session", "shard", "undone")

    def __init__(self, root: Callable[[], Any]) -> None:
        """`root` returns the transaction, or None once it is garbage. For SQLAlchemy it is a weak reference: the
        transaction references its connection, the key under which the Binding stores this object, so that a strong
        reference would keep both forever."""
        self._root = root
        self.session: weakref.ref[Session] | None = None
        """The session that the transaction belongs to; None for a transaction of a plain connection."""
        self.sends: list[tuple[tuple[str, ...], PackedMessage, Message | None]] = []
        """For each message: the savepoints that it was sent within, the encoded message, and the original Message if
        its key is a callable, which is called at the commit."""
        self.failed: BaseException | None = None
        self.rolled_back = False
        """Whether the session's owner asked for the rollback."""
        self.undone: BaseException | None = None
        """The error with which the database itself has rolled back the whole transaction."""
        self.dropped: list[PackedMessage] = []
        """The messages that a rollback of the whole transaction discarded."""
        self.prepared = False
        self.id = ""
        self.shard: str | None = None

    def __del__(self) -> None:
        """A session that is garbage without having been closed fires no event."""
        if self.session is not None and sys.exc_info()[0] is None:
            _warn_of_dropped(self)

    @property
    def root(self) -> Any:
        """The transaction; None once it is garbage."""
        return self._root()

    @property
    def is_active(self) -> bool:
        """Whether a transaction of SQLAlchemy is still active."""
        root = self._root()
        return root is not None and root.is_active


_listening = False


def listen_to_sessions() -> None:
    """Listen to the Session class, once in a process: listeners on instances cost twenty times as much."""
    global _listening
    if not _listening:
        _listening = True
        event.listen(Session, "before_commit", _see_one_transaction)
        event.listen(Session, "after_flush", _see_one_transaction)
        event.listen(Session, "after_commit", _after_commit)
        event.listen(Session, "after_rollback", _after_rollback)
        event.listen(Session, "after_transaction_end", _after_transaction_end)


def connections_of_session(session: Session) -> list[Connection]:
    """The connections of the session's root transaction."""
    root = session.get_transaction()
    return [key for key in getattr(root, "_connections", None) or () if isinstance(key, Connection)]


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
        binding, bound = carried
        # A released savepoint fires this event too; only the COMMIT of the root transaction sets `prepared`.
        if bound.prepared:
            del session.info[INFO_KEY]
            binding.committed(bound)


def _after_rollback(session: Session) -> None:
    """A savepoint's rollback fires this event too, with the root still active; `close` does not fire it."""
    carried = session.info.get(INFO_KEY)
    if carried is not None and not carried[1].is_active:
        carried[1].rolled_back = True


def _after_transaction_end(session: Session, transaction: Any) -> None:
    if transaction.parent is not None:
        return
    carried = session.info.pop(INFO_KEY, None)
    if carried is None:
        return
    bound: PendingMessages = carried[1]
    # If an exception ends the session, the exception says enough.
    if sys.exc_info()[0] is None:
        _warn_of_dropped(bound)
    bound.session = None


def _warn_of_dropped(bound: PendingMessages) -> None:
    """Warn of the messages of a session that ended without a commit that was tried, or a rollback."""
    lost = [packed for _, packed, _ in bound.sends] + bound.dropped
    if lost and not bound.prepared and not bound.rolled_back and bound.failed is None:
        topics = ", ".join(sorted({packed.topic for packed in lost})[:5])
        log.warning(
            "a session was closed before its commit: its %d messages to %s are dropped, and so are its changes; call "
            "session.commit(), or session.rollback() if you want to drop them",
            len(lost),
            topics,
        )
