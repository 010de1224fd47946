"""ThreadOutgoing and LoopOutgoing: how the halves, outcomes and messages of a producer leave, for threads and for
coroutines.

For threads the client runs on an event loop in a separate thread. A thread that is alone sends its requests itself
(`blocking.py`); if several threads send, the loop combines their halves in one request. A forked child gets a new loop
and thread at its first use, and so does a process whose threads gevent or eventlet has replaced. For coroutines the
client runs on their own event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import datetime
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from sqlalchemy.util import await_only

from notify.check.listener import Outcome
from notify.client.producer.blocking import BlockingSender
from notify.client.producer.half_sender import CLOSED
from notify.client.producer.options import ProducerPlan
from notify.client.producer.running import Running
from notify.client.producer.sent import Sent
from notify.client.producer.transactions import accepted
from notify.client.producer.withdrawals import WithdrawalOutcome, outcome_of
from notify.client.threads.loop import LoopThread, home, instance_name, running_loop
from notify.errors import BindingRefused, Closed, Timeout
from notify.protocol.wire import Item, PackedMessage, PackedSchedule
from notify.runtime.green import patched_by
from notify.runtime.program_log import program_log

log = program_log("notify.client")
START_SECONDS = 10.0
"""How long the loop's thread may take to start."""
FINISH_SECONDS = 1.0
"""How long `close` waits for the answer to an outcome that a thread has sent itself."""
MANY = 20
"""After so many producers, and each time as many more, the log says that they are many."""
EXIT_SECONDS = 2.0
"""How long waiting outcomes may delay the end of the process; check-back recovers outcomes that are not sent then."""
NOT_STORED = "the outcome of %s is not stored yet, a check will find it: %s"
LATE_TURNS = 10
"""Turns of an event loop from an answer that waits to be read to the caller."""
PAUSE_SECONDS = 0.02
"""The pause between two looks at a condition that a commit waits for."""


class ThreadOutgoing:
    """Sends for threads. Its loop starts at the first use."""

    def __init__(self, plan: ProducerPlan) -> None:
        self._plan = plan
        self._home = home()
        self._moving: dict[tuple[int, object], threading.Lock] = {}
        """The lock of each home that this has moved to: one of another home may be held for ever."""
        self._starting = threading.RLock()
        self._started: tuple[LoopThread, Running] | None = None
        self._blocking: BlockingSender | None = None
        """Set before `_started`."""
        self._abandoned: list[object] = []
        """Loops and pools of the processes before a fork; they must not become garbage here."""
        self.is_closed = False
        _open.add(self)
        register_after_fork(self, ThreadOutgoing._flush_at_the_end)

    def start(self) -> tuple[LoopThread, Running]:
        """Start the loop's thread, if it does not run yet; returns the thread and its Running.

        Raises Closed after `close`, BindingRefused if the process cannot run threads, and Timeout if the thread does
        not start.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        self._come_home()
        if self._started is None:
            with self._starting:  # only one of several first threads starts the loop
                if self.is_closed:
                    raise Closed(CLOSED)
                if self._started is None:
                    _refuse_dead_threads()
                    thread = LoopThread(f"notify-producer-{self._plan.group}")
                    try:
                        running = thread.run(self._make(), START_SECONDS)
                    except TimeoutError:
                        raise Timeout(f"the producer's thread did not start within {START_SECONDS:g} s") from None
                    if self.is_closed:  # by a signal handler of this thread
                        thread.run(running.close())
                        thread.close()
                        raise Closed(CLOSED)
                    # Greenlets take turns anyway, and a socket of theirs belongs to one thread.
                    self._blocking = None if patched_by() else BlockingSender(thread, running, self._plan.half_timeout)
                    running.finish_direct = self._finish_direct
                    self._started = thread, running
                    _warn_of_many()
        return self._started

    def start_ahead(self) -> None:
        """Start before the first use, if this process will be the one that uses it.

        uWSGI loads the application in its master and then forks the workers, without Python's hooks: a lock that our
        thread holds at that moment, such as one of the engine's pool, would be held for ever in the workers.
        """
        if not _is_before_uwsgis_fork():
            self.start()

    def _come_home(self) -> None:
        """Leave what belongs to the process before a fork, or to threads that greenlets have replaced.

        A forked child has none of its parent's threads, and must not close the parent's loop.
        """
        here = home()
        if self._home == here:
            return
        with self._moving.setdefault(here, threading.Lock()):
            if self._home == here:
                return
            left, blocking = self._started, self._blocking
            self._started = self._blocking = None
            self._starting = threading.RLock()
            if self._home[0] != here[0]:
                self._abandoned.append(left)
                if blocking is not None:
                    blocking.abandon()
                self._plan.instance = instance_name()
            elif left is not None:
                thread, running = left
                thread.loop.call_soon_threadsafe(lambda: thread.loop.create_task(running.close()))
            self._home = here

    async def _make(self) -> Running:
        return Running(self._plan)

    def answer_checks(self) -> None:
        """Answer checks from now on, because a listener was added."""
        self.start_ahead()
        if self._started is not None:
            thread, running = self._started
            thread.run(_answer_checks(running), START_SECONDS)

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half, wait, and return its item. Raises Timeout, and the errors of `accepted`."""
        until = time.monotonic() + self._plan.half_timeout
        thread, running = self.start()
        client = running.client
        blocking = self._blocking
        try:
            item = None if blocking is None else blocking.store_half(transaction_id, messages, source)
        except Timeout:
            raise
        except BaseException:
            self._replace(blocking)
            raise
        if item is not None:
            return accepted(item)
        # In mode auto the commit continues without the half; in mode half the loop's own, more telling error is
        # awaited.
        is_auto = self._plan.mode == "auto"
        seconds = max(0.001, until - time.monotonic()) if is_auto else self._plan.half_timeout + 1
        try:
            item = accepted(thread.wait_for(lambda: client.half_soon(transaction_id, messages, source), seconds))
        except TimeoutError:
            raise Timeout("the half was not answered in time") from None
        if (blocking := self._blocking) is not None:  # another thread may have replaced it
            blocking.loop_was_answered()
            if is_auto:
                blocking.notice_lost_outcome()  # the server of this half may be the next one
        return item

    def upload(self, messages: list[PackedMessage]) -> None:
        """Store the large bodies of messages, and wait. Raises ObjectStoreFailed, and Closed after `close`."""
        if self._plan.bodies is not None:
            if self.is_closed:
                raise Closed(CLOSED)
            self._plan.bodies.upload(messages)

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome; does nothing after `close`, or before the first half. With `wait_for_outcome`, wait until
        the server has stored a COMMIT."""
        self._come_home()
        if self._started is not None and not self.is_closed:
            thread, running = self._started
            if self._plan.wait_for_outcome and outcome == "COMMIT":
                self._wait_for(transaction_id, shard, outcome)
                return
            blocking = self._blocking
            try:
                is_sent = blocking is not None and blocking.outcome_soon(transaction_id, shard, outcome)
            except BaseException:
                self._replace(blocking)
                raise
            if not is_sent:
                running.hand_over(thread, transaction_id, shard, outcome)

    def wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait while a condition holds, at most `seconds`."""
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)

    def _wait_for(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Send an outcome and wait at most `half_timeout` until the server has stored it. Raises nothing of the server:
        the transaction is committed."""
        thread, running = self.start()
        seconds = self._plan.half_timeout
        try:
            why = thread.run(running.stored(transaction_id, shard, outcome, seconds), seconds + 1)
        except (TimeoutError, Closed) as error:
            why = str(error) or f"no answer within {seconds:g} s"
        if why:
            log.warning(NOT_STORED, transaction_id, why)

    def _finish_direct(self) -> None:
        if self._blocking is not None:
            self._blocking.finish(0.0)

    def _replace(self, interrupted: BlockingSender | None) -> None:
        """Replace the connections and locks after an exception of a signal handler has interrupted a thread that sent
        itself: it is unknown which locks are held, and which answer comes next."""
        if interrupted is not None and self._started is not None and self._blocking is interrupted:
            self._blocking = BlockingSender(*self._started, self._plan.half_timeout)
            interrupted.close(0.0)

    def outcome_of_withdrawal(self, withdrawal: Sent, seconds: float) -> WithdrawalOutcome:
        """The end of a withdrawal; waits at most `seconds` until it is decided. Raises Closed, and the server's
        errors."""
        thread, running = self.start()
        return thread.run(outcome_of(running.client.asking_for(withdrawal.id, withdrawal.shard), seconds))

    def publish(self, message: PackedMessage) -> str:
        """Send a message without a transaction, wait, and return its id. Raises InvalidRequest, Unavailable, Closed."""
        thread, running = self.start()
        return thread.run(running.client.publish(message))

    def schedule(self, name: str, schedule: PackedSchedule) -> list[datetime]:
        """Declare a schedule, wait, and return its next instants. Raises Closed, and the errors of
        `TransactionClient.schedule`."""
        thread, running = self.start()
        return thread.run(running.client.schedule(name, schedule))

    def unschedule(self, name: str) -> bool:
        """Delete a schedule, wait, and return whether there was one. Raises InvalidRequest, Unavailable, Closed."""
        thread, running = self.start()
        return thread.run(running.client.unschedule(name))

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

    def leave_pool(self) -> None:
        """In a forked child, leave the connections of the engine's pool to the parent. The service may not have used
        its engine before the fork, but our threads have: parent and children would talk over the same socket."""
        engine = self._plan.engine
        if engine is not None and self._started is not None and engine.dialect.name != "sqlite":
            self._abandoned.append(engine.pool)
            engine.dispose(close=False)

    def flush(self, seconds: float) -> list[str]:
        """Wait at most `seconds` until all that was queued has reached the server; see ThreadProducer.flush."""
        self._come_home()
        if self._started is None:
            return []
        thread, running = self._started
        end = time.monotonic() + seconds
        if self._blocking is not None:
            self._blocking.finish(min(FINISH_SECONDS, seconds))
        remaining = max(0.0, end - time.monotonic())
        try:
            return thread.run(running.flush(remaining), remaining + 1)
        except (TimeoutError, Closed):
            return running.unsent()

    def flush_at_exit(self, seconds: float) -> None:
        """Wait at most `seconds` until all queued items are sent."""
        if self._started is not None and self._home == home():
            thread, running = self._started
            if self._blocking is not None:
                self._blocking.finish(min(FINISH_SECONDS, seconds))
            with contextlib.suppress(TimeoutError, Closed):
                thread.run(running.client.flush(), seconds)

    def _flush_at_the_end(self) -> None:
        """Flush at the end of this child of `multiprocessing`, which calls no functions of atexit."""
        Finalize(None, self.flush_at_exit, (EXIT_SECONDS,), exitpriority=0)

    def close(self) -> None:
        """Send the outcomes that wait, stop answering checks, and close the connections."""
        self.is_closed = True
        _open.discard(self)
        self._come_home()
        with self._starting:  # a first thread may be starting the loop
            pass
        if self._started is not None:
            thread, running = self._started
            if self._blocking is not None:
                self._blocking.close(FINISH_SECONDS)
            thread.run(running.close())
            thread.close()
        if self._plan.bodies is not None:
            self._plan.bodies.close()


async def _answer_checks(running: Running) -> None:
    running.answer_checks()


_open: weakref.WeakSet[ThreadOutgoing] = weakref.WeakSet()


def _warn_of_many() -> None:
    """Say so if producers are made again and again, such as one for each request, and never closed: each keeps its
    thread and its connections, until the process may open no more files."""
    count = sum(outgoing._started is not None for outgoing in list(_open))
    if count % MANY == 0:
        log.warning(
            "%d producers are open in this process, each with a thread and connections of its own: make one when the "
            "process starts, and use it for all requests, or close each one", count
        )  # fmt: skip


def _leave_all_after_fork() -> None:
    """Leave what the parent has. Where a fork calls no hooks, each first use does so, but for the engine's pool."""
    for outgoing in list(_open):
        outgoing.leave_pool()
        outgoing._come_home()


def _uwsgi() -> Any:
    """uWSGI's own module, which only its processes have; None in other processes."""
    return sys.modules.get("uwsgi")


def _is_before_uwsgis_fork() -> bool:
    """Whether this is uWSGI's master, which loads the application and then forks the workers."""
    uwsgi = _uwsgi()
    return uwsgi is not None and not (uwsgi.worker_id() or uwsgi.mule_id() or uwsgi.i_am_the_spooler())


def _refuse_dead_threads() -> None:
    """Raises BindingRefused in a process of uWSGI in which a thread would do no good."""
    options = getattr(_uwsgi(), "opt", None)
    if options is not None and not any(options.get(name) for name in ("enable-threads", "threads", "gevent")):
        raise BindingRefused("uWSGI stops Python's threads between requests: start it with enable-threads = true")
    if _is_before_uwsgis_fork():
        raise BindingRefused(
            "uWSGI forks its workers from this process, and a thread that runs at that moment may hang them: use the "
            "producer in the workers, or start uWSGI with lazy-apps = true"
        )


def _flush_all_at_exit() -> None:
    """Send outcomes of a script that ends right after its commit, without `close`; otherwise check-back would have to
    recover them."""
    end = time.monotonic() + EXIT_SECONDS
    for outgoing in list(_open):
        outgoing.flush_at_exit(max(0.0, end - time.monotonic()))


atexit.register(_flush_all_at_exit)
os.register_at_fork(after_in_child=_leave_all_after_fork)


class LoopOutgoing:
    """Sends for coroutines. Its client is made on their event loop, at the first use at the latest."""

    def __init__(self, plan: ProducerPlan) -> None:
        self._plan = plan
        self._running: Running | None = None
        self._waits: _Waits
        """Made with the client, for its loop."""
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
        Closed after `close`, BindingRefused if the previous event loop is still open, or none runs here.
        """
        if self.is_closed:
            raise Closed(CLOSED)
        self._come_home()
        loop = running_loop()
        self.refuse_other_loop()
        if self._running is not None and loop is not self._loop:
            self._forget()
        if self._running is None:
            self._loop = loop
            self._running = Running(self._plan)
            self._waits = _Waits(self._plan.half_timeout)
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
        answer = self.start().client.half_soon(transaction_id, messages, source)
        if self._plan.mode != "auto":
            return accepted(await_only(answer))
        return accepted(self._waits.wait_for(answer))

    def upload(self, messages: list[PackedMessage]) -> None:
        """Store the large bodies of messages, and wait in SQLAlchemy's greenlet. Raises ObjectStoreFailed."""
        if self._plan.bodies is not None:
            await_only(self._plan.bodies.upload_soon(messages))

    async def upload_soon(self, messages: list[PackedMessage]) -> None:
        """Store the large bodies of messages that belong to no database's transaction. Raises ObjectStoreFailed, and
        Closed after `close`."""
        if self._plan.bodies is not None:
            self.start()
            await self._plan.bodies.upload_soon(messages)

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
                log.warning(NOT_STORED, transaction_id, why)
        else:
            self._running.queue_outcome(transaction_id, shard, outcome)

    def wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait in SQLAlchemy's greenlet while a condition holds, at most `seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while condition() and loop.time() < until:
            await_only(asyncio.sleep(PAUSE_SECONDS))

    async def outcome_of_withdrawal(self, withdrawal: Sent, seconds: float) -> WithdrawalOutcome:
        """The end of a withdrawal; waits at most `seconds` until it is decided."""
        return await outcome_of(self.start().client.asking_for(withdrawal.id, withdrawal.shard), seconds)

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
        try:
            if running is not None:
                await running.close()
        finally:
            if self._plan.bodies is not None:
                self._plan.bodies.close()


class _Waits:
    """The waits for the answers to halves, of coroutines on one event loop, which end after `seconds`.

    One timer serves them all: uvloop makes another turn for each timer that is cancelled.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[asyncio.Future[Item], float] = {}
        """When each wait ends at the latest, by the loop's time; the first one ends first."""
        self._is_timed = False

    def wait_for(self, answer: asyncio.Future[Item]) -> Item:
        """Wait in SQLAlchemy's greenlet. Raises Timeout, and the future's errors."""
        loop = answer.get_loop()
        self._until[answer] = loop.time() + self._seconds
        if not self._is_timed:
            self._is_timed = True
            loop.call_later(self._seconds, self._look, loop)
        try:
            return await_only(answer)
        finally:
            del self._until[answer]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for answer, until in self._until.items():
            if until > now:
                loop.call_at(until, self._look, loop)
                return
            _expire(answer, self._seconds)
        self._is_timed = False


def _expire(answer: asyncio.Future[Item], seconds: float, turns: int = LATE_TURNS) -> None:
    """End the wait for a half's answer, also if the half still waits to be sent.

    `turns`: of the loop, before the wait ends: an answer may have come while the application blocked the loop.
    """
    if answer.done():
        return
    if turns:
        answer.get_loop().call_soon(_expire, answer, seconds, turns - 1)
    else:
        answer.set_exception(Timeout(f"the half was not answered within {seconds:g} s"))


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
