"""ThreadOutgoing: the Outgoing for threads, whose client runs on an event loop in a separate thread.

A thread that is alone sends its requests itself (`alone.py`); if several threads send, the loop combines their halves
in one request. A forked child gets a new loop and thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from typing import TypeVar

from notify.check.listener import Outcome
from notify.client.alone import Alone
from notify.client.instance import instance_name
from notify.client.loop import LoopThread
from notify.client.outgoing import CLOSED
from notify.client.running import Plan, Running
from notify.client.transactions import accepted
from notify.errors import Closed, Timeout
from notify.wire import Item, PackedMessage

T = TypeVar("T")
FINISH_SECONDS = 1.0
"""How long `close` waits for the answer to an outcome that a thread has sent itself."""
EXIT_SECONDS = 2.0
"""How long waiting outcomes may delay the end of the process; check-back recovers outcomes that are not sent then."""


class ThreadOutgoing:
    """Sends for threads. Its loop starts at the first use."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._starting = threading.Lock()
        self._started: tuple[LoopThread, Running] | None = None
        self._alone: Alone | None = None
        """Set before `_started`."""
        self._abandoned: object = None
        self.is_closed = False
        _open.add(self)

    def start(self) -> tuple[LoopThread, Running]:
        """Start the loop's thread, if it does not run yet; returns the thread and its Running. Raises Closed after
        `close`."""
        if self.is_closed:
            raise Closed(CLOSED)
        if self._started is None:
            with self._starting:  # only one of several first threads starts the loop
                if self._started is None:
                    thread = LoopThread(f"notify-producer-{self._plan.group}")
                    running = thread.run(self._make())
                    self._alone = Alone(thread, running, self._plan.half_timeout)
                    self._started = thread, running
        return self._started

    async def _make(self) -> Running:
        return Running(self._plan)

    def answer_checks(self) -> None:
        """Answer checks from now on, because a listener was added."""
        thread, running = self.start()
        thread.run(_answer_checks(running))

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half, wait, and return its item. Raises Timeout, and the errors of `accepted`."""
        thread, running = self.start()
        client = running.client
        alone = self._alone
        try:
            item = None if alone is None else alone.store_half(transaction_id, messages, source)
        except Timeout:
            raise
        except BaseException:
            self._replace(alone)
            raise
        if item is not None:
            return accepted(item)
        seconds = self._plan.half_timeout + 1
        try:
            item = accepted(thread.wait_for(lambda: client.half_soon(transaction_id, messages, source), seconds))
        except TimeoutError:
            raise Timeout("the half was not answered in time") from None
        if self._alone is not None:
            self._alone.loop_was_answered()
        return item

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome; does nothing after `close`, or before the first half."""
        if self._started is not None and not self.is_closed:
            thread, running = self._started
            alone = self._alone
            try:
                is_sent = alone is not None and alone.outcome_soon(transaction_id, shard, outcome)
            except BaseException:
                self._replace(alone)
                raise
            if not is_sent:
                thread.call(running.queue_outcome, transaction_id, shard, outcome)

    def _replace(self, interrupted: Alone | None) -> None:
        """Replace the lines and locks after an exception of a signal handler has interrupted a thread that sent itself:
        it is unknown which locks are held, and which answer comes next."""
        if interrupted is not None and self._started is not None and self._alone is interrupted:
            self._alone = Alone(*self._started, self._plan.half_timeout)
            interrupted.close(0.0)

    def publish(self, message: PackedMessage) -> str:
        """Send a message without a transaction, wait, and return its id. Raises InvalidRequest, Unavailable, Closed."""
        thread, running = self.start()
        return thread.run(running.client.publish(message))

    def prepare(self, messages: list[PackedMessage], check_after: float | None) -> Item:
        """Store the half of a transaction outside of a database, wait, and return its item. Raises Closed, and the
        errors of `TransactionClient.prepare`."""
        thread, running = self.start()
        return thread.run(running.client.prepare(messages, check_after))

    def resolve(self, transaction_id: str, shard: str | None, outcome: Outcome) -> str:
        """Record the outcome of a prepared half, wait, and return the state. Raises Closed, and the errors of
        Running.resolve."""
        thread, running = self.start()
        return thread.run(running.resolve(transaction_id, shard, outcome))

    def renew_after_fork(self) -> None:
        """Forget the parent's thread, which does not exist in the child. The first use in the child starts a new one.

        It cannot be started here, because a thread cannot start before the fork has returned.
        """
        self._abandoned = self._started  # the parent's loop must not be closed by this process
        self._started = None
        if self._alone is not None:
            self._alone.abandon()
            self._alone = None
        self._starting = threading.Lock()  # another thread of the parent may have held it
        self._plan.instance = instance_name()

    def flush_at_exit(self, seconds: float) -> None:
        """Wait at most `seconds` until all queued items are sent."""
        if self._started is not None:
            thread, running = self._started
            if self._alone is not None:
                self._alone.finish(min(FINISH_SECONDS, seconds))
            with contextlib.suppress(TimeoutError, Closed):
                thread.run(running.client.flush(), seconds)

    def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections."""
        self.is_closed = True
        _open.discard(self)
        if self._started is not None:
            thread, running = self._started
            if self._alone is not None:
                self._alone.close(FINISH_SECONDS)
            thread.run(running.close())
            thread.close()


async def _answer_checks(running: Running) -> None:
    running.answer_checks()


_open: weakref.WeakSet[ThreadOutgoing] = weakref.WeakSet()


def _renew_all_after_fork() -> None:
    for outgoing in list(_open):
        outgoing.renew_after_fork()


def _flush_all_at_exit() -> None:
    """Send outcomes of a script that ends right after its commit, without `close`; otherwise check-back would have to
    recover them."""
    end = time.monotonic() + EXIT_SECONDS
    for outgoing in list(_open):
        outgoing.flush_at_exit(max(0.0, end - time.monotonic()))


atexit.register(_flush_all_at_exit)
os.register_at_fork(after_in_child=_renew_all_after_fork)
