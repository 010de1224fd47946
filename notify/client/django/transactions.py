"""Listener: observes how the transactions and savepoints of one of Django's connections end.

Django has no hook before COMMIT: `transaction.on_commit` runs after it. Therefore the first `send` on a connection
replaces six methods of this one connection object by methods of the listener, which get the original method as an
argument. `_commit` is the last moment before COMMIT, and an exception there stops the commit.

Errors of the database are observed from the connection's beginning. Some errors roll back the whole transaction, while
Django believes that it goes on. Code that catches such an error would commit messages without the changes before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db.utils import DatabaseErrorWrapper

from notify.client.django.carrier import DjangoCarrier
from notify.client.outgoing import CLOSED
from notify.client.packing import pack_unkeyed
from notify.client.pending_messages import PendingMessages, undone
from notify.errors import BindingRefused, Closed
from notify.protocol.message import Message
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import has_undone

log = logging.getLogger("notify.client")

ATTRIBUTE = "notify_listener"
"""The attribute of a Django connection that holds its listener."""
REPLACED = ("_commit", "_rollback", "_close", "_savepoint", "_savepoint_rollback", "_savepoint_commit")


@dataclass(slots=True)
class Carried:
    """The messages of one transaction, and the carrier of their producer."""

    carrier: DjangoCarrier
    bound: PendingMessages
    sent_before: dict[str, int] = field(default_factory=dict)
    """For each savepoint, the number of messages that had been sent when it was made."""


class Listener:
    """Listens to one Django connection, which belongs to one thread. Made by `listener_of`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._carried: Carried | None = None
        self._undone: BaseException | None = None
        """The error with which the database itself has rolled back the whole transaction."""
        for name in REPLACED:
            setattr(wrapper, name, functools.partial(getattr(self, name), getattr(wrapper, name)))
        listen_to_errors(wrapper)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, carrier: DjangoCarrier, message: Message) -> None:
        """Add a message to the connection's transaction, in its current savepoint.

        Raises BindingRefused without a transaction, InvalidRequest for an invalid message, Closed if the producer is
        closed, and Django's TransactionManagementError in a transaction that can only be rolled back.
        """
        if carrier.is_closed:
            raise Closed(CLOSED)
        wrapper = self._wrapper
        wrapper.validate_thread_sharing()
        if not wrapper.in_atomic_block and wrapper.get_autocommit():
            raise BindingRefused(
                f"there is no transaction on the database {wrapper.alias!r} that the message could join, so it would "
                "be sent whatever becomes of the change: send within transaction.atomic() or with ATOMIC_REQUESTS, or "
                "use publish() for a message that belongs to no change"
            )
        wrapper.validate_no_broken_transaction()
        if self._undone is not None:
            raise undone(self._undone)
        packed = pack_unkeyed(message)
        carried = self._current()
        if carried is None:
            _begin_on_sqlite(wrapper)
            driver = wrapper.connection
            carried = self._carried = Carried(carrier, PendingMessages(lambda: driver))
        elif not carried.bound.sends:
            carried.carrier = carrier
        elif carried.carrier is not carrier:
            raise BindingRefused("this transaction already carries messages of another producer")
        carrier.take(carried.bound, (), packed, message)

    def _current(self) -> Carried | None:
        """The messages of the current transaction; None if Django has opened another driver's connection since."""
        carried = self._carried
        return carried if carried is not None and carried.bound.root is self._wrapper.connection else None

    def sends(self) -> tuple[DjangoCarrier | None, list[tuple[PackedMessage, Message | None]]]:
        """The carrier and the messages of the current transaction: each encoded, with the original Message if its key
        is a callable."""
        carried = self._current()
        if carried is None:
            return None, []
        return carried.carrier, [(packed, late) for _, packed, late in carried.bound.sends]

    @property
    def carries(self) -> bool:
        """Whether the current transaction has messages."""
        carried = self._current()
        return carried is not None and bool(carried.bound.sends)

    def note_undone(self, error: BaseException) -> None:
        """Note that the database has rolled back the current transaction, which can carry no message any more."""
        self._undone = error

    # --- the replaced methods of Django's connection ----------------------------------------------------------

    def _commit(self, original: Callable[[], object]) -> None:
        carried = self._current()
        if carried is None or not carried.bound.sends:
            self._forget()
            original()
            return
        try:
            if self._undone is not None:
                raise undone(self._undone)
            carried.carrier.prepare_on(self._wrapper, carried.bound)
        except BaseException:
            self._undo()
            raise
        try:
            original()
        finally:
            self._forget()  # if COMMIT itself fails, the outcome is unknown, and a check decides
        carried.carrier.committed(carried.bound)

    def _undo(self) -> None:
        """Roll back the transaction whose commit was stopped. Django does this only after an error of the database.

        Otherwise the next transaction of this connection would commit its changes and run its on_commit callbacks.
        """
        try:
            self._wrapper.rollback()
        except Exception:
            self._wrapper.close()

    def _forget(self) -> None:
        self._carried = self._undone = None

    def _rollback(self, original: Callable[[], object]) -> None:
        self._forget()
        original()

    def _close(self, original: Callable[[], object]) -> None:
        carried = self._carried
        self._forget()
        if carried is not None and carried.bound.sends:
            log.warning(
                "the connection to the database %r was closed within its transaction: its %d messages are dropped, and "
                "so are its changes",
                self._wrapper.alias,
                len(carried.bound.sends),
            )
        original()

    def _savepoint(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._carried is not None:
            self._carried.sent_before[sid] = len(self._carried.bound.sends)

    def _savepoint_rollback(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._carried is not None:
            # An unknown savepoint was made before the first message, so that it drops all messages.
            del self._carried.bound.sends[self._carried.sent_before.get(sid, 0) :]

    def _savepoint_commit(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._carried is not None:
            self._carried.sent_before.pop(sid, None)  # keeps the dict small: a transaction may make many savepoints


def _begin_on_sqlite(wrapper: Any) -> None:
    """Begin SQLite's transaction before its savepoints, if it is managed by hand: a transaction that begins with a
    savepoint is committed when the savepoint is released, and no method of Django's notices. Raises BindingRefused
    within a savepoint.
    """
    driver = wrapper.connection
    if wrapper.vendor != "sqlite" or driver.isolation_level is None:  # None: Django has begun it, for `atomic`
        return
    if any(wrapper.savepoint_ids):
        raise BindingRefused(
            "SQLite may commit this transaction, which is managed by hand (set_autocommit(False)), with the end of the "
            "atomic block: send a message before the block, or leave autocommit on and use atomic() alone"
        )
    if not driver.in_transaction:
        driver.execute("BEGIN")


def listener_of(wrapper: Any) -> Listener:
    """The listener of a Django connection; the first call makes it."""
    listener: Listener | None = getattr(wrapper, ATTRIBUTE, None)
    if listener is None:
        listener = Listener(wrapper)
        setattr(wrapper, ATTRIBUTE, listener)
    return listener


class _ObservedErrors(DatabaseErrorWrapper):
    """Passes on the errors of a Django connection's driver, and notes which of them have ended its transaction."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self._original = wrapper.wrap_database_errors  # a backend may have its own class

    def __enter__(self) -> None:
        self._original.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, self.wrapper.Database.Error):
            _observe(self.wrapper, error)
        self._original.__exit__(kind, error, traceback)


def _observe(wrapper: Any, error: BaseException) -> None:
    if wrapper.connection is None or not (wrapper.in_atomic_block or not wrapper.autocommit):
        return
    listener: Listener | None = getattr(wrapper, ATTRIBUTE, None)
    has_begun = listener is not None and listener.carries
    if has_undone(wrapper.vendor, wrapper.connection, error, has_begun=has_begun):
        listener_of(wrapper).note_undone(error)


def listen_to_errors(wrapper: Any) -> None:
    """Observe the errors of a Django connection from now on; the connection is not changed otherwise."""
    if not isinstance(wrapper.wrap_database_errors, _ObservedErrors):
        wrapper.wrap_database_errors = _ObservedErrors(wrapper)
