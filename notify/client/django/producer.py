"""DjangoProducer: sends messages with the transactions of Django's ORM."""

from __future__ import annotations

import ssl
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.asyncio import async_unsafe

from notify.check.sources import Sources
from notify.client.choosing import Chooser, room_then_load
from notify.client.django.carrier import DjangoCarrier
from notify.client.django.engine import django_engine_of
from notify.client.django.transactions import listener_of
from notify.client.inbox import PURGE_AFTER_SECONDS
from notify.client.login import Shown
from notify.client.rows import Mode
from notify.client.running import Plan
from notify.client.thread_producer import ThreadProducer
from notify.client.transactions import HALF_SECONDS
from notify.protocol.message import Message


class DjangoProducer(ThreadProducer):
    """Sends messages with the transactions of one of Django's databases, from threads.

    `using`: the database's alias; `schema`: the schema of Notify's tables; None: where each transaction's connection
    finds them, also with django-tenants. The other arguments are those of TransactionProducer. The producer starts its
    threads, and so begins to answer checks, with `start` or when the first transaction with a message commits.
    Raises InvalidRequest, and BindingRefused for a database that cannot carry messages.
    """

    def __init__(
        self,
        url: str,
        *,
        group: str,
        using: str = DEFAULT_DB_ALIAS,
        schema: str | None = None,
        mode: Mode = "half",
        keep_messages: bool = False,
        batching: bool = True,
        answer_checks: bool = True,
        half_timeout: float = HALF_SECONDS,
        check_after: float | None = None,
        purge_after: float | None = PURGE_AFTER_SECONDS,
        token: Shown = None,
        tls: ssl.SSLContext | None = None,
        chooser: Chooser = room_then_load,
        wait_for_outcome: bool = False,
    ) -> None:
        lender = django_engine_of(using)
        plan = Plan(
            url=url,
            group=group,
            engine=lender.engine,
            mode=mode,
            batching=batching,
            answer_checks=answer_checks,
            half_timeout=half_timeout,
            check_after=check_after,
            purge_after=purge_after,
            token=token,
            tls=tls,
            chooser=chooser,
            sources=Sources(schema),
            wait_for_outcome=wait_for_outcome,
        )
        super().__init__(plan)
        self.using = using
        self._carrier: DjangoCarrier = DjangoCarrier(
            self.outgoing, group, mode, lender, plan.sources, keep_messages=keep_messages
        )

    def start(self) -> None:
        """Begin to answer checks, if the producer does not answer them yet. Raises Closed after `close`."""
        self.outgoing.start()

    @async_unsafe
    def send(self, message: Message) -> None:
        """Send a message with the current transaction: consumers get it if and only if the transaction commits.

        The message belongs to the innermost `atomic` block, or savepoint, that it was sent in. Raises BindingRefused
        outside of a transaction, InvalidRequest for an invalid message, Closed after `close`. The message is encoded
        now; only a callable key is called later, at the commit. The end of the outermost `atomic` block raises
        TransactionRefused if the server refused the half, and Backpressure if the server accepts no halves at the
        moment: then nothing is committed, and the transaction may be retried. In coroutines, use `sync_to_async` around
        the whole transaction, as with any transaction of Django.
        """
        wrapper: Any = connections[self.using]
        listener_of(wrapper).send(self._carrier, message)
