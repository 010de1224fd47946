"""DjangoInbox: commits a handler's effect, made with Django's ORM, together with the row that records it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from notify.client.django.engine import django_engine_of, django_errors
from notify.client.django.tables import MAKE_TABLES
from notify.client.handlers import call_to_the_end
from notify.client.inbox import PURGE_AFTER_SECONDS, Inbox
from notify.client.inbox_rows import Guard, has_ended, is_claimed, refuse_partial
from notify.errors import InvalidRequest
from notify.protocol.message import ReceivedMessage


class DjangoInbox(Inbox):
    """Makes effects happen exactly once in one of Django's databases, for Consumer.

    Handlers get only the message. They use Django's ORM within the inbox's transaction, and messages that they `send`
    join this transaction.
    """

    gives_session = False
    make_tables = MAKE_TABLES

    def __init__(
        self,
        using: str = DEFAULT_DB_ALIAS,
        *,
        schema: str | None = None,
        purge_after: float | None = PURGE_AFTER_SECONDS,
    ) -> None:
        """`using`: the database's alias; `schema`, `purge_after`: see Inbox. Raises BindingRefused, InvalidRequest."""
        self.using = using
        self._engine = django_engine_of(using)
        super().__init__(self._engine.engine, schema=schema, purge_after=purge_after)

    def run(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> bool:
        """Call `handler(message)` in a transaction and commit its effect; False if the message took effect before.

        An exception of the handler rolls the transaction back and is raised here. Raises InvalidRequest if the handler
        leaves a transaction that can only be rolled back, or returns a coroutine instead of doing its work.
        """
        guard = None
        try:
            with self._turns.turn(), self._transaction() as wrapper:
                with django_errors(wrapper):
                    is_new = self._claim(connection := self._engine.borrow(wrapper), group, message)
                if is_new:
                    with Guard(connection) as guard:
                        call_to_the_end(handler, message)
                        self._release(wrapper, guard)
        except BaseException as error:
            if guard is not None and guard.is_lost:
                refuse_partial(self.call(is_claimed, group, [message]), error)
            raise
        return is_new

    def run_batch(self, group: str, messages: Sequence[ReceivedMessage], handler: Callable[..., Any]) -> int:
        """Call `handler(messages)` with the messages that had no effect before, commit, and return their number.

        All is one transaction: an exception of the handler rolls back the claims and effects of all messages, and is
        raised here. The handler is not called without messages. Raises InvalidRequest like `run`.
        """
        guard, fresh = None, []
        try:
            with self._turns.turn(), self._transaction() as wrapper:
                with django_errors(wrapper):
                    fresh = self._claim_all(connection := self._engine.borrow(wrapper), group, messages)
                if fresh:
                    with Guard(connection) as guard:
                        call_to_the_end(handler, fresh)
                        self._release(wrapper, guard)
        except BaseException as error:
            if guard is not None and guard.is_lost:
                refuse_partial(self.call(is_claimed, group, fresh), error)
            raise
        return len(fresh)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A transaction on Django's connection; broken and old connections of this thread are closed before and after.

        Raises InvalidRequest if autocommit is off, because the end of `atomic` would not commit then.
        """
        _renew_connections()
        wrapper = connections[self.using]
        if not wrapper.in_atomic_block and not wrapper.get_autocommit():
            raise InvalidRequest(
                f"autocommit is off on the database {self.using!r}, so that atomic() does not commit, and a message "
                "would count as handled without its effect: leave AUTOCOMMIT at True",
                "inbox_autocommit",
            )
        try:
            with transaction.atomic(using=self.using, durable=True):
                yield wrapper
        finally:
            _renew_connections()

    def _release(self, wrapper: Any, guard: Guard) -> None:
        """Raises InvalidRequest if the commit would silently be a rollback: the message would count as handled."""
        try:
            if wrapper.closed_in_transaction or wrapper.needs_rollback:
                raise has_ended()
            guard.release()
        except InvalidRequest:
            raise InvalidRequest(
                "the handler returned from a transaction that can only be rolled back, so its effect cannot be "
                "committed with the message: raise what should roll it back, put what may fail alone into "
                "transaction.atomic(), and close no connection",
                "inbox_commit",
            ) from None

    async def call_async(self, function: Callable[..., Any], *arguments: Any) -> NoReturn:
        """Raises InvalidRequest: see `run_async`."""
        raise InvalidRequest(
            "Django's transactions do not run in coroutines, so AsyncConsumer cannot have a DjangoInbox: use Consumer, "
            "whose handlers are plain functions in threads"
        )

    async def run_async(self, group: str, message: ReceivedMessage, handler: Callable[..., Any]) -> NoReturn:
        """Raises InvalidRequest."""
        await self.call_async(handler)

    async def run_batch_async(
        self, group: str, messages: Sequence[ReceivedMessage], handler: Callable[..., Any]
    ) -> NoReturn:
        """Raises InvalidRequest."""
        await self.call_async(handler)


def _renew_connections() -> None:
    """Close the connections of this thread that are broken or have reached their CONN_MAX_AGE, as Django does between
    requests."""
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:  # the transaction of a test case stays open
            wrapper.close_if_unusable_or_obsolete()
