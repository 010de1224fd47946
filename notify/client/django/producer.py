"""DjangoProducer: sends messages with the transactions of Django's ORM."""

from __future__ import annotations

from typing import Any, Unpack

from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.asyncio import async_unsafe

from notify.client.django.engine import django_engine_of
from notify.client.django.transactions import DjangoHalfSender, listener_of
from notify.client.producer.options import ProducerOptions, ProducerPlan, takes_options
from notify.client.producer.producer import ThreadProducer
from notify.client.producer.sent import Sent
from notify.client.producer.withdrawals import Target, Withdrawal, cancellation, replacement, withdrawing
from notify.protocol.message import Message


class DjangoProducer(ThreadProducer):
    """Sends messages with the transactions of one of Django's databases, from threads.

    `using`: the database's alias; `schema`: the schema of Notify's tables; None: where each transaction's connection
    finds them, also with django-tenants. The other arguments are those of TransactionProducer. The producer starts its
    threads, and so begins to answer checks, with `start` or when the first transaction with a message commits.
    Raises InvalidRequest, and BindingRefused for a database that cannot carry messages.
    """

    @takes_options
    def __init__(
        self, url: str, *, group: str, using: str = DEFAULT_DB_ALIAS, **options: Unpack[ProducerOptions]
    ) -> None:
        engine = django_engine_of(using)
        super().__init__(ProducerPlan(url=url, group=group, engine=engine.engine, **options))
        self.using = using
        self._half_sender: DjangoHalfSender = DjangoHalfSender(self.outgoing, self._plan, engine)

    def start(self) -> None:
        """Begin to answer checks, if the producer does not answer them yet. Raises Closed after `close`."""
        self.outgoing.start()

    @async_unsafe
    def send(self, message: Message) -> Sent:
        """Send a message with the current transaction: consumers get it if and only if the transaction commits. What is
        returned has the message's id.

        The message belongs to the innermost `atomic` block, or savepoint, that it was sent in. Raises BindingRefused
        outside of a transaction, InvalidRequest for an invalid message, Closed after `close`. The message is encoded
        now; only a callable key is called later, at the commit. The end of the outermost `atomic` block raises
        TransactionRefused if the server refused the half, and Backpressure if the server accepts no halves at the
        moment: then nothing is committed, and the transaction may be retried. In coroutines, use `sync_to_async` around
        the whole transaction, as with any transaction of Django.
        """
        wrapper: Any = connections[self.using]
        return listener_of(wrapper).send(self._half_sender, message)

    @async_unsafe
    def cancel(self, message: Target, *, topic: str | None = None, key: str | int | None = None) -> Withdrawal:
        """Cancel a delayed message with the current transaction; see TransactionProducer.cancel."""
        return withdrawing(self.send(cancellation(message, topic=topic, key=key)), self.outgoing.outcome_of_withdrawal)

    @async_unsafe
    def replace(self, message: Target, by: Message) -> Withdrawal:
        """Replace a delayed message with the current transaction; see TransactionProducer.replace."""
        return withdrawing(self.send(replacement(message, by)), self.outgoing.outcome_of_withdrawal)
