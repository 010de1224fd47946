"""DjangoCarrier: carries the messages of one producer with transactions of one of Django's databases."""

from __future__ import annotations

from typing import Any

from notify.check.listener import Outcome
from notify.check.sources import Sources
from notify.client.django.engine import DjangoEngine, django_errors
from notify.client.half_sender import HalfSender
from notify.client.pending_messages import PendingMessages
from notify.client.places import Places
from notify.client.rows import Mode
from notify.client.table import SENDS
from notify.client.thread_outgoing import ThreadOutgoing
from notify.protocol.wire import PackedMessage

MAKE_TABLES = "run `manage.py migrate` with notify.client.django in INSTALLED_APPS"


class DjangoCarrier(HalfSender):
    """Carries messages with transactions of Django's connections to one database."""

    def __init__(
        self,
        outgoing: ThreadOutgoing,
        group: str,
        mode: Mode,
        lender: DjangoEngine,
        sources: Sources,
        *,
        keep_messages: bool,
    ) -> None:
        places = Places(sources, SENDS[mode], MAKE_TABLES, "call notify.client.django.create_tables(schema={})")
        super().__init__(outgoing, group, mode, places, keep_messages=keep_messages)
        self._threads = outgoing
        self._lender = lender

    def prepare_on(self, wrapper: Any, bound: PendingMessages) -> None:
        """`prepare` in the transaction of a Django connection; errors of the database are raised as Django's errors.

        The first call starts the threads, so that this process answers checks. They do not start earlier, so that a
        test whose transaction never commits starts nothing.
        """
        if not self.is_closed:
            self._threads.start()
        with django_errors(wrapper):
            self.prepare(self._lender.borrow_in_place(wrapper), bound)

    def deliver(self, messages: list[PackedMessage]) -> None:
        """Send messages as those of a committed transaction; for tests whose own transaction never commits."""
        half = self._threads.prepare(messages, None)
        self._threads.resolve(half.id, half.shard, Outcome.COMMIT)
