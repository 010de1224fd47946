"""The messages that one transaction carries, and what SQLAlchemy's sessions tell of its end.

Session events are full of traps (savepoints fire before_commit and after_commit, close() fires no rollback); the few
used here are after_commit, to queue the outcome, after_transaction_end, to let go, and those that come before the first
of a session's connections commits, to see that there is one.
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
from notify.message import Message
from notify.wire import PackedMessage

log = logging.getLogger("notify.client")

INFO_KEY = "notify_transaction"
"""Where a session's `info` holds the binding and the messages of its transaction."""

SEVERAL = (
    "this session commits to several databases, or in several transactions of one: in no order, and without a common "
    "outcome; send messages from a session whose work goes through one engine"
)


def undone(error: BaseException) -> BindingRefused:
    """Why a transaction that the database has rolled back carries no message."""
    return BindingRefused(
        "nothing is committed: the database has rolled back the whole transaction with an error that was caught, so "
        f"that what came before it is gone: roll back, and repeat all of it. The error: {error}"
    )


class BoundTransaction:
    """The messages of one root transaction."""

    __slots__ = ("_root", "dropped", "failed", "id", "prepared", "rolled_back", "sends", "session", "shard", "undone")

    def __init__(self, root: Callable[[], Any]) -> None:
        """`root` gives the transaction, and None once nobody holds it any more. A reference to a transaction of
        SQLAlchemy is weak: it holds its connection, by which this is found, and both would stay for ever."""
        self._root = root
        self.session: weakref.ref[Session] | None = None
        """The session that the transaction belongs to, if one does."""
        self.sends: list[tuple[tuple[str, ...], PackedMessage, Message | None]] = []
        """Each message, encoded, with the savepoints that it was sent within; and as it was given, if its key is a
        callable, which is asked at the commit."""
        self.failed: BaseException | None = None
        self.rolled_back = False
        """Whether the session's owner asked for the rollback."""
        self.undone: BaseException | None = None
        """The error with which the database itself has rolled back what the transaction had done until then."""
        self.dropped: list[PackedMessage] = []
        """The messages that a rollback of the whole transaction took with it."""
        self.prepared = False
        self.id = ""
        self.shard: str | None = None

    @property
    def root(self) -> Any:
        """The transaction; None once nobody holds it any more."""
        return self._root()

    @property
    def is_active(self) -> bool:
        """Whether a transaction of SQLAlchemy goes on."""
        root = self._root()
        return root is not None and root.is_active


_listening = False


def listen_to_sessions() -> None:
    """Once a process, on the Session class: listeners on instances cost twenty times as much."""
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


def connections_of_bound(bound: BoundTransaction) -> list[Connection]:
    session = None if bound.session is None else bound.session()
    return [] if session is None else connections_of_session(session)


def _see_one_transaction(session: Session, context: Any = None) -> None:
    """Several have no common outcome: refuse before any of them commits, also one that the commit's own flush began."""
    carried = session.info.get(INFO_KEY)
    if carried is None or not carried[1].sends:
        return
    if len(connections_of_session(session)) > 1:
        carried[1].failed = BindingRefused(SEVERAL)
        raise carried[1].failed


def _after_commit(session: Session) -> None:
    carried = session.info.get(INFO_KEY)
    if carried is not None:
        binding, bound = carried
        # A released savepoint comes here too; only the guard of the root's COMMIT prepares.
        if bound.prepared:
            del session.info[INFO_KEY]
            binding.committed(bound)


def _after_rollback(session: Session) -> None:
    """A savepoint's rollback comes here too, with the root still active; `close` does not."""
    carried = session.info.get(INFO_KEY)
    if carried is not None and not carried[1].is_active:
        carried[1].rolled_back = True


def _after_transaction_end(session: Session, transaction: Any) -> None:
    if transaction.parent is not None:
        return
    carried = session.info.pop(INFO_KEY, None)
    if carried is None:
        return
    bound: BoundTransaction = carried[1]
    lost = [packed for _, packed, _ in bound.sends] + bound.dropped
    # While an error passes through, that is what ends the session, and what is said.
    if lost and not bound.prepared and not bound.rolled_back and bound.failed is None and sys.exc_info()[0] is None:
        topics = ", ".join(sorted({packed.topic for packed in lost})[:5])
        log.warning(
            "a session was closed before its commit: its %d messages to %s are dropped, and so are its changes; call "
            "session.commit(), or session.rollback() where that is meant",
            len(lost),
            topics,
        )
