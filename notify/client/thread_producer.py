"""ThreadProducer: the common base of the producers for threads, for SQLAlchemy and for Django."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from notify.check.listener import CheckMessageListener
from notify.client.half_sender import HalfSender
from notify.client.handles import SyncPrepared
from notify.client.packing import pack, pack_all
from notify.client.running import FLUSH_SECONDS, Plan, check_check_after, check_flush
from notify.client.thread_outgoing import ThreadOutgoing
from notify.protocol.message import Message
from notify.runtime import tracing


class ThreadProducer:
    """Base of the producers for threads: a thin shell over code that runs on an event loop."""

    _carrier: HalfSender

    def __init__(self, plan: Plan) -> None:
        self.url = plan.url
        self.group = plan.group
        self.mode = plan.mode
        self._plan = plan
        self.outgoing = ThreadOutgoing(plan)

    @property
    def instance(self) -> str:
        """The name of this process among the instances of its group."""
        return self._plan.instance

    def add_check_listener(self, listener: CheckMessageListener) -> None:
        """Let a listener answer the checks of its topics, instead of the local table. Raises InvalidRequest."""
        self._plan.add_listener(listener)
        self.outgoing.answer_checks()

    def publish(self, message: Message) -> str:
        """Send a message without a transaction and return its id. The message is durable when this returns.

        Raises InvalidRequest, Unavailable, IdInUse, and Closed after `close`.
        """
        self.outgoing.start()
        packed = pack(message)
        with tracing.sending([packed]):
            return self.outgoing.publish(packed)

    def prepare(self, messages: Sequence[Message], *, check_after: float | None = None) -> SyncPrepared:
        """Store a half for a transaction that is not in a database; end it with commit() or rollback().

        After `check_after` seconds (None: the producer's setting) the server asks for the outcome, and a listener
        answers. Raises InvalidRequest, TransactionRefused, Unavailable, and Closed after `close`.
        """
        if check_after is not None:
            check_check_after(check_after)
        packed = pack_all(messages)
        with tracing.sending(packed):
            item = self.outgoing.prepare(packed, check_after)
        return SyncPrepared(self.outgoing.resolve, item.id, item.shard)

    def flush(self, timeout: float = FLUSH_SECONDS) -> list[str]:
        """Wait at most `timeout` seconds until the server has every outcome that is on its way, such as before the
        platform freezes the process, or at the end of a script.

        Returns the ids of the committed or rolled-back transactions whose outcome it does not have then; a check finds
        these later. An outcome that could not be sent earlier is sent again. Raises InvalidRequest for a timeout that
        is not a number of seconds.
        """
        return self.outgoing.flush(check_flush(timeout))

    def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections.

        A transaction that has messages and has not committed yet cannot commit any more: its commit raises
        TransactionRefused.
        """
        if self.outgoing.is_closed:
            return
        self._take_no_more()
        self.outgoing.close()

    def _take_no_more(self) -> None:
        """Refuse messages and commits from now on."""
        self._carrier.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
