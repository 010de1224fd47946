"""Listener: hears how the transactions of one of Django's connections end, savepoints included.

Django has no hook before COMMIT: `transaction.on_commit` runs after it. So the first `send` on a connection puts this
listener before six methods of that one object, whatever its backend: each calls the listener with the method that was
there. `_commit` is the last moment before COMMIT, and what raises there stops it.

Errors of the database are heard from the connection's beginning: some roll back the whole transaction, and Django takes
it for going on. Whoever catches one and goes on would commit messages without the changes before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db.utils import DatabaseErrorWrapper

from notify.client.bound import BoundTransaction, undone
from notify.client.django.carrier import DjangoCarrier
from notify.client.outgoing import CLOSED
from notify.client.packing import pack_unkeyed
from notify.databases import has_undone
from notify.errors import BindingRefused, Closed
from notify.message import Message
from notify.wire import PackedMessage

log = logging.getLogger("notify.client")

ATTRIBUTE = "notify_listener"
"""Where a Django connection holds its listener."""
HEARD = ("_commit", "_rollback", "_close", "_savepoint", "_savepoint_rollback", "_savepoint_commit")


@dataclass(slots=True)
class Carried:
    """The messages of one transaction, and whose they are."""

    carrier: DjangoCarrier
    bound: BoundTransaction
    sent_before: dict[str, int] = field(default_factory=dict)
    """By savepoint, how many messages had been sent when it was made."""


class Listener:
    """Listens to one Django connection, a thread's own. Made by `listener_of`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._carried: Carried | None = None
        self._undone: BaseException | None = None
        """The error with which the database itself has rolled back what the transaction had done until then."""
        for name in HEARD:
            setattr(wrapper, name, functools.partial(getattr(self, name), getattr(wrapper, name)))
        listen_to_errors(wrapper)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, carrier: DjangoCarrier, message: Message) -> None:
        """Add a message to the connection's transaction, in its current savepoint.

        Raises BindingRefused where there is no transaction, InvalidRequest for what is no message, Closed after the
        producer's end, and Django's TransactionManagementError in a transaction that can only be rolled back.
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
            carried = self._carried = Carried(carrier, BoundTransaction(lambda: driver))
        elif not carried.bound.sends:
            carried.carrier = carrier
        elif carried.carrier is not carrier:
            raise BindingRefused("this transaction already carries messages of another producer")
        carrier.take(carried.bound, (), packed, message)

    def _current(self) -> Carried | None:
        """The messages of the current transaction; None where the driver's connection is another one by now."""
        carried = self._carried
        return carried if carried is not None and carried.bound.root is self._wrapper.connection else None

    def sends(self) -> tuple[DjangoCarrier | None, list[tuple[PackedMessage, Message | None]]]:
        """Whose messages the transaction carries now, and each: encoded, and as it was given if its key is late."""
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
        """The database has rolled back the current transaction with this error: it carries no message any more."""
        self._undone = error

    # --- what Django does -------------------------------------------------------------------------------------

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
            self._forget()  # after an error of COMMIT itself nobody knows the outcome: the check decides
        carried.carrier.committed(carried.bound)

    def _undo(self) -> None:
        """End the transaction whose commit was stopped. Django does so only after an error of the database.

        Otherwise the next transaction of this connection would commit its changes, and run its on_commit callbacks.
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
            # A savepoint that is not known was made before the first message, so it comes before them all.
            del self._carried.bound.sends[self._carried.sent_before.get(sid, 0) :]

    def _savepoint_commit(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._carried is not None:
            self._carried.sent_before.pop(sid, None)  # it is gone: a transaction may make any number of them


def _begin_on_sqlite(wrapper: Any) -> None:
    """Have SQLite's transaction begin before its savepoints, where it is managed by hand: one that begins with a
    savepoint is committed as that is released, without a word to anyone. Raises BindingRefused within a savepoint.
    """
    driver = wrapper.connection
    if wrapper.vendor != "sqlite" or driver.isolation_level is None:  # Django has begun it, for `atomic`
        return
    if any(wrapper.savepoint_ids):
        raise BindingRefused(
            "SQLite may commit this transaction, which is managed by hand (set_autocommit(False)), with the end of the "
            "atomic block: send a message before the block, or leave autocommit on and use atomic() alone"
        )
    if not driver.in_transaction:
        driver.execute("BEGIN")


def listener_of(wrapper: Any) -> Listener:
    """The listener of a Django connection; it begins to listen with the first call."""
    listener: Listener | None = getattr(wrapper, ATTRIBUTE, None)
    if listener is None:
        listener = Listener(wrapper)
        setattr(wrapper, ATTRIBUTE, listener)
    return listener


class _HeardErrors(DatabaseErrorWrapper):
    """Passes on the errors of a Django connection's driver, and hears which of them have ended its transaction."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self._original = wrapper.wrap_database_errors  # a backend may have one of its own

    def __enter__(self) -> None:
        self._original.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, self.wrapper.Database.Error):
            _hear(self.wrapper, error)
        self._original.__exit__(kind, error, traceback)


def _hear(wrapper: Any, error: BaseException) -> None:
    if wrapper.connection is None or not (wrapper.in_atomic_block or not wrapper.autocommit):
        return
    known: Listener | None = getattr(wrapper, ATTRIBUTE, None)
    has_begun = known is not None and known.carries
    if has_undone(wrapper.vendor, wrapper.connection, error, has_begun=has_begun):
        listener_of(wrapper).note_undone(error)


def listen_to_errors(wrapper: Any) -> None:
    """Hear of the errors of a Django connection from now on; nothing else of it changes."""
    if not isinstance(wrapper.wrap_database_errors, _HeardErrors):
        wrapper.wrap_database_errors = _HeardErrors(wrapper)
