"""LoopOutgoing: the Outgoing for coroutines, whose client runs on the event loop of the caller."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
import weakref

from sqlalchemy.util import await_only

from notify.client.instance import instance_name
from notify.client.outgoing import CLOSED
from notify.client.running import Plan, Running
from notify.client.transactions import accepted
from notify.errors import BindingRefused, Closed
from notify.protocol.wire import Item, PackedMessage

log = logging.getLogger("notify.client")


class LoopOutgoing:
    """Sends for coroutines. Its client is made on their event loop, at the first use at the latest."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: Running | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the client runs on."""
        self._process = os.getpid()
        """The process that the client runs in."""
        self._abandoned: list[object] = []
        """The clients of the processes before a fork; they must not become garbage here."""
        self._forgotten: weakref.finalize[[str, int], LoopOutgoing] | None = None
        """Called if this object is garbage-collected, or the interpreter exits, before `close`."""
        self.is_closed = False

    def start(self) -> Running:
        """Start the client, if it does not run yet, and return it. Call this on the event loop.

        If the previous event loop was closed, or belongs to the process before a fork, a new client is started. Raises
        Closed after `close`, BindingRefused if the previous event loop is still open.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        self._come_home()
        self.refuse_other_loop()
        loop = asyncio.get_running_loop()
        if self._running is not None and loop is not self._loop:
            self._forget()
        if self._running is None:
            self._loop = loop
            self._running = Running(self._plan)
            self._forgotten = weakref.finalize(self, _say_forgotten, self._plan.group, os.getpid())
        return self._running

    def _come_home(self) -> None:
        """Leave the client of the process before a fork, whose sockets are the parent's."""
        if self._process != os.getpid():
            self._abandoned += [self._running, self._loop]
            self._running = self._loop = None
            self._process = os.getpid()
            self._plan.instance = instance_name()

    def refuse_other_loop(self) -> None:
        """Raises BindingRefused if the client runs on an event loop that is open and not this one."""
        if self._running is None or self._loop is None or self._loop.is_closed():
            return
        if self._loop is not asyncio.get_running_loop():
            raise BindingRefused(
                "this AsyncTransactionProducer runs on another event loop, in another thread: make one for each loop, "
                "and close it there"
            )

    def _forget(self) -> None:
        """Forget the client of an event loop that was closed, such as the loop of an earlier `asyncio.run`."""
        self._running = None
        if self._forgotten is not None:
            self._forgotten()

    def start_in_a_loop(self) -> None:
        """Start and answer checks, if an event loop is running; otherwise `start` is called later."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self.start().answer_checks()

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half, wait in SQLAlchemy's greenlet, and return its item. Raises the errors of `accepted`."""
        client = self.start().client
        return accepted(await_only(client.half_soon(transaction_id, messages, source)))

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome; does nothing after `close`, or before the first half. With `wait_for_outcome`, wait in
        SQLAlchemy's greenlet until the server has stored a COMMIT."""
        self._come_home()
        if self._running is None:
            return
        if self._plan.wait_for_outcome and outcome == "COMMIT":
            seconds = self._plan.half_timeout
            why = await_only(self._running.stored(transaction_id, shard, outcome, seconds))
            if why:
                log.warning("the outcome of %s is not stored yet, a check will find it: %s", transaction_id, why)
        else:
            self._running.queue_outcome(transaction_id, shard, outcome)

    async def flush(self, seconds: float) -> list[str]:
        """Wait at most `seconds` until all that was queued has reached the server; see ThreadProducer.flush. Raises
        BindingRefused if the client runs on another event loop that is still open."""
        self._come_home()
        self.refuse_other_loop()
        if self._running is None or self._loop is not asyncio.get_running_loop():
            return []
        return await self._running.flush(seconds)

    async def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections.

        If the client's event loop was closed before, nothing can be sent any more, and a warning says so. Raises
        BindingRefused if that loop is another one and still open.
        """
        self._come_home()
        self.refuse_other_loop()
        self.is_closed = True
        if self._loop is not asyncio.get_running_loop():
            self._forget()
            return
        if self._forgotten is not None:
            self._forgotten.detach()
        running, self._running = self._running, None
        if running is not None:
            await running.close()


def _say_forgotten(group: str, process: int) -> None:
    """Warn of a producer that was never closed. Its loop has ended or will end, so nothing can be sent for it any more.

    A forked child (another `process`) has a copy of its parent's producer, and says nothing.
    """
    if process != os.getpid():
        return
    warning = (
        f"an AsyncTransactionProducer of group {group!r} was never closed, so that outcomes that it had not sent yet "
        "are left to check-back: use it in `async with`, or `await producer.close()` before the event loop ends"
    )
    log.warning("%s", warning)
    warnings.warn(warning, ResourceWarning, stacklevel=2)
