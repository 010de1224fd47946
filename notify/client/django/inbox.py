"""DjangoInbox: commits a handler's effect, made with Django's ORM, together with the row that records it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import django.db
import sqlalchemy as sa
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from notify.client.consumer.consumer import renew_djangos_connections
from notify.client.django.engine import django_engine_of, django_errors
from notify.client.django.tables import MAKE_TABLES
from notify.client.inbox.inbox import PURGE_AFTER_SECONDS, Finish, Inbox
from notify.client.inbox.rows import Guard, has_ended
from notify.errors import InvalidRequest
from notify.protocol.message import ReceivedMessage
from notify.runtime.databases import is_gone, says_away


class DjangoInbox(Inbox):
    """Makes effects happen exactly once in one of Django's databases, for Consumer.

    Handlers get only the message. They use Django's ORM within the inbox's transaction, and messages that they `send`
    join this transaction. A handler that leaves a transaction which can only be rolled back has failed.
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

    def is_away(self, error: BaseException) -> bool:
        """As Inbox's, also for errors of Django's."""
        if isinstance(error, django.db.Error):
            return says_away(error.__cause__ or error)
        return super().is_away(error)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[tuple[sa.Connection, tuple[Any, ...], Finish]]:
        """A transaction on Django's connection; broken and old connections of this thread are closed before and after.

        Raises InvalidRequest if autocommit is off, because the end of `atomic` would not commit then.
        """
        renew_djangos_connections()
        wrapper = connections[self.using]
        if not wrapper.in_atomic_block and not wrapper.get_autocommit():
            raise InvalidRequest(
                f"autocommit is off on the database {self.using!r}, so that atomic() does not commit, and a message "
                "would count as handled without its effect: leave AUTOCOMMIT at True",
                "inbox_autocommit",
            )
        try:
            with transaction.atomic(using=self.using, durable=True):
                with django_errors(wrapper):
                    connection = self._engine.borrow(wrapper)
                yield connection, (), functools.partial(self._release, wrapper)
        except django.db.Error as error:
            if is_gone(error.__cause__) and not wrapper.in_atomic_block:
                wrapper.close()  # Django would find the session of a former primary usable, and keep it
            raise
        finally:
            renew_djangos_connections()

    def _claimed(
        self, group: str, messages: Sequence[ReceivedMessage], connection: sa.Connection
    ) -> list[ReceivedMessage]:
        with django_errors(connections[self.using]):
            return super()._claimed(group, messages, connection)

    def _release(self, wrapper: Any, guard: Guard | None) -> None:
        """Raises InvalidRequest if the commit would silently be a rollback: the message would count as handled."""
        if guard is None:
            return
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
        """Raises InvalidRequest."""
        raise InvalidRequest(
            "Django's transactions do not run in coroutines, so AsyncConsumer cannot have a DjangoInbox: use Consumer, "
            "whose handlers are plain functions in threads"
        )

    async def _run_async(self, group: str, messages: Sequence[ReceivedMessage], handle: Callable[..., Any]) -> NoReturn:
        await self.call_async(handle)
