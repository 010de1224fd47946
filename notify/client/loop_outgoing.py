"""Outgoing of coroutines: the client runs on the event loop of whoever sends."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
import weakref

from sqlalchemy.util import await_only

from notify.client.outgoing import CLOSED
from notify.client.running import Plan, Running
from notify.client.transactions import accepted
from notify.errors import BindingRefused, Closed
from notify.wire import Item, PackedMessage

log = logging.getLogger("notify.client")


class LoopOutgoing:
    """Sends for coroutines. What runs is made within their loop, at the first use at the latest."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running: Running | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of what runs."""
        self._forgotten: weakref.finalize[[str, int], LoopOutgoing] | None = None
        """Called when this is collected, or the interpreter exits, before `close`."""
        self.is_closed = False

    def start(self) -> Running:
        """The client, and what answers checks. To be called on the loop.

        Where the loop before has been closed, this begins anew. Raises Closed after `close`, BindingRefused where the
        other loop goes on.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        loop = asyncio.get_running_loop()
        if self._running is not None and loop is not self._loop:
            self._leave_loop()
        if self._running is None:
            self._loop = loop
            self._running = Running(self._plan)
            self._forgotten = weakref.finalize(self, _say_forgotten, self._plan.group, os.getpid())
        return self._running

    def _leave_loop(self) -> None:
        """Let go of what ran on a loop that was closed, such as that of an earlier `asyncio.run`."""
        if self._loop is not None and not self._loop.is_closed():
            raise BindingRefused(
                "this AsyncTransactionProducer runs on another event loop, in another thread: make one for each loop"
            )
        self._running = None
        if self._forgotten is not None:
            self._forgotten()

    def start_in_a_loop(self) -> None:
        """Start, and answer checks, where an event loop runs already."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # `start` comes later, within one
        self.start().answer_checks()

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half and wait, in SQLAlchemy's greenlet; its item. Raises what `accepted` raises."""
        client = self.start().client
        client.source = source
        return accepted(await_only(client.half_soon(transaction_id, messages)))

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome; after `close`, or before the first half, none."""
        if self._running is not None:
            self._running.queue_outcome(transaction_id, shard, outcome)

    async def close(self) -> None:
        """Flush outcomes that wait, stop answering checks, let go."""
        self.is_closed = True
        if self._forgotten is not None:
            self._forgotten.detach()
        running, self._running = self._running, None
        if running is not None and self._loop is asyncio.get_running_loop():
            await running.close()


def _say_forgotten(group: str, process: int) -> None:
    """Its loop has ended, or will: nothing can be sent for it any more. A fork has a producer that is not its own."""
    if process != os.getpid():
        return
    said = (
        f"an AsyncTransactionProducer of group {group!r} was never closed, so that outcomes that it had not sent yet "
        "are left to check-back: use it in `async with`, or `await producer.close()` before the event loop ends"
    )
    log.warning("%s", said)
    warnings.warn(said, ResourceWarning, stacklevel=2)
