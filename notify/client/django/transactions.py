"""Listener: observes how the transactions and savepoints of one of Django's connections end.

Django has no hook before COMMIT: `transaction.on_commit` runs after it. Therefore the first `send` on a connection
replaces some methods of this one connection object by methods of the listener, which get the original method as an
argument. `_commit` is the last moment before COMMIT, and an exception there stops the commit.

Errors of the database are observed from the connection's beginning. Some errors roll back the whole transaction, while
Django believes that it continues. Code that catches such an error would commit messages without the changes before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db.utils import DatabaseErrorWrapper, Error

from notify.check.listener import Outcome
from notify.client.django.engine import DjangoEngine, django_errors
from notify.client.django.tables import MAKE_TABLES
from notify.client.producer.half_sender import CLOSED, HalfSender, PendingMessages, undone
from notify.client.producer.options import ProducerPlan
from notify.client.producer.outgoing import ThreadOutgoing
from notify.client.producer.sent import Sent
from notify.errors import BindingRefused, Closed
from notify.protocol.limits import LIMITS
from notify.protocol.message import Message
from notify.protocol.wire import PackedMessage
from notify.runtime.databases import has_undone
from notify.runtime.program_log import program_log

log = program_log("notify.client")

ATTRIBUTE = "notify_listener"
"""The attribute of a Django connection that holds its listener."""
REPLACED = (
    "_commit", "_rollback", "_close", "_savepoint", "_savepoint_rollback", "_savepoint_commit", "_set_autocommit",
)  # fmt: skip


class DjangoHalfSender(HalfSender):
    """Sends the messages of one producer with transactions of Django's connections to one database."""

    def __init__(self, outgoing: ThreadOutgoing, plan: ProducerPlan, engine: DjangoEngine) -> None:
        super().__init__(outgoing, plan, MAKE_TABLES, "call notify.client.django.create_tables(schema={})")
        self._threads = outgoing
        self._engine = engine

    def prepare_on(self, wrapper: Any, pending: PendingMessages) -> None:
        """`prepare` in the transaction of a Django connection; errors of the database are raised as Django's errors.

        The first call starts the threads, so that this process answers checks. They do not start earlier, so that a
        test whose transaction never commits starts nothing.
        """
        if not self.is_closed:
            self._threads.start()
        with django_errors(wrapper):
            self.prepare(self._engine.borrow_in_place(wrapper), pending)

    def deliver(self, messages: list[PackedMessage]) -> None:
        """Send messages as those of a committed transaction; for tests whose own transaction never commits."""
        self._threads.upload(messages)
        most = LIMITS.messages_per_transaction
        for begin in range(0, len(messages), most):  # a test may have tried several transactions
            half = self._threads.prepare(messages[begin : begin + most], None)
            self._threads.resolve(half.id, half.shard, Outcome.COMMIT)


@dataclass(slots=True)
class _Sent:
    """The messages of one transaction, and the sender of their producer."""

    half_sender: DjangoHalfSender
    pending: PendingMessages
    sent_before: dict[str, int] = field(default_factory=dict)
    """For each savepoint, the number of messages that had been sent when it was made."""


class Listener:
    """Listens to one Django connection, which belongs to one thread. Made by `listener_of`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._sent: _Sent | None = None
        self._undone: BaseException | None = None
        """The error with which the database itself has rolled back the whole transaction."""
        for name in REPLACED:
            setattr(wrapper, name, functools.partial(getattr(self, name), getattr(wrapper, name)))
        listen_to_errors(wrapper)

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, half_sender: DjangoHalfSender, message: Message) -> Sent:
        """Add a message to the connection's transaction, in its current savepoint.

        Raises BindingRefused without a transaction, InvalidRequest for an invalid message, Closed if the producer is
        closed, and Django's TransactionManagementError in a transaction that can only be rolled back.
        """
        if half_sender.is_closed:
            raise Closed(CLOSED)
        wrapper = self._wrapper
        wrapper.validate_thread_sharing()
        if not wrapper.in_atomic_block and wrapper.get_autocommit():
            raise BindingRefused(
                f"there is no transaction on the database {wrapper.alias!r} that the message could join, so it would "
                "be sent even if the change is rolled back: send within transaction.atomic() or with ATOMIC_REQUESTS, "
                "or use publish() for a message that belongs to no change"
            )
        wrapper.validate_no_broken_transaction()
        if self._undone is not None:
            raise undone(self._undone)
        packed = half_sender.pack(message)
        sent = self._current()
        if sent is None:
            _begin_on_sqlite(wrapper)
            driver = wrapper.connection
            sent = self._sent = _Sent(half_sender, PendingMessages(lambda: driver))
        elif not sent.pending.sends:
            sent.half_sender = half_sender
        elif sent.half_sender is not half_sender:
            raise BindingRefused("this transaction already carries messages of another producer")
        number = half_sender.add(sent.pending, (), packed, message, self._of_tests_before(sent))
        return Sent(sent.pending, number, packed)

    def _of_tests_before(self, sent: _Sent) -> int:
        """How many messages a TestCase has sent before the transaction of the code that it tests: for Django that is a
        savepoint, the first one within the test's own."""
        blocks = self._wrapper.atomic_blocks
        tests = sum(1 for block in blocks if block._from_testcase) if blocks else 0
        return sent.sent_before.get(self._wrapper.savepoint_ids[tests - 1], 0) if 0 < tests < len(blocks) else 0

    def _current(self) -> _Sent | None:
        """The messages of the current transaction; None if Django has opened another driver's connection since."""
        sent = self._sent
        return sent if sent is not None and sent.pending.root is self._wrapper.connection else None

    def sends(self) -> tuple[DjangoHalfSender | None, list[tuple[PackedMessage, Message | None]]]:
        """The sender and the messages of the current transaction: each encoded, with the original Message if its key
        is a callable."""
        sent = self._current()
        if sent is None:
            return None, []
        return sent.half_sender, [(packed, late) for _, packed, late in sent.pending.sends]

    @property
    def carries(self) -> bool:
        """Whether the current transaction has messages."""
        sent = self._current()
        return sent is not None and bool(sent.pending.sends)

    def note_undone(self, error: BaseException) -> None:
        """Note that the database has rolled back the current transaction, which can carry no message any more."""
        self._undone = error

    # --- the replaced methods of Django's connection ----------------------------------------------------------

    def _commit(self, original: Callable[[], object]) -> None:
        sent = self._current()
        if sent is None or not sent.pending.sends:
            self._forget()
            original()
            return
        try:
            if self._undone is not None:
                raise undone(self._undone)
            sent.half_sender.prepare_on(self._wrapper, sent.pending)
        except BaseException:
            self._undo()
            raise
        try:
            original()
        finally:
            self._forget()  # if COMMIT itself fails, the outcome is unknown, and a check decides
        sent.half_sender.committed(sent.pending)

    def _undo(self) -> None:
        """Roll back the transaction whose commit was stopped. Django does this only after an error of the database.

        Otherwise the next transaction of this connection would commit its changes and run its on_commit callbacks.
        """
        try:
            self._wrapper.rollback()
        except Exception:
            self._wrapper.close()

    def _forget(self) -> None:
        self._sent = self._undone = None

    def _drop(self) -> None:
        """The whole transaction is rolled back."""
        if self._sent is not None:
            self._sent.pending.drop_all()
        self._forget()

    def _rollback(self, original: Callable[[], object]) -> None:
        """Drop the messages once the rollback is over. If a time limit or Ctrl-C interrupts it, Django's `atomic` turns
        autocommit on, with which MySQL and SQLite would commit the changes; `_set_autocommit` refuses that while there
        are messages."""
        try:
            original()
        except Error:
            self._drop()  # Django closes the connection
            raise
        self._drop()

    def _close(self, original: Callable[[], object]) -> None:
        sent = self._sent
        if sent is not None and sent.pending.sends:
            log.warning(
                "the connection to the database %r was closed within its transaction: its %d messages are dropped, and "
                "so are its changes",
                self._wrapper.alias,
                len(sent.pending.sends),
            )
        self._drop()
        original()

    def _set_autocommit(self, original: Callable[[bool], object], autocommit: bool) -> None:
        """Raises BindingRefused where MySQL's drivers and sqlite3 would commit; PostgreSQL's refuse it themselves."""
        if autocommit and self.carries:
            raise BindingRefused(
                "turning autocommit on would commit the transaction without its messages: call transaction.commit() or "
                "transaction.rollback() before it"
            )
        original(autocommit)

    def _savepoint(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._sent is not None:
            self._sent.sent_before[sid] = len(self._sent.pending.sends)

    def _savepoint_rollback(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._sent is not None:
            # An unknown savepoint was made before the first message, so that it drops all messages.
            del self._sent.pending.sends[self._sent.sent_before.get(sid, 0) :]

    def _savepoint_commit(self, original: Callable[[str], object], sid: str) -> None:
        original(sid)
        if self._sent is not None:
            self._sent.sent_before.pop(sid, None)  # keeps the dict small: a transaction may make many savepoints


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
