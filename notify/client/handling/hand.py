"""Hand: what a consumer has in hand, from the reply to the settle: runs of messages, those that wait, and their fates.

The handlers' threads and coroutines take messages from here and note here what became of them. A session of one queue
server (client/consumer/session.py) puts runs in, and settles what was noted; over Kafka client/kafka/handling.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import repeat
from typing import NoReturn

from msgspec import Struct

from notify.client.handling.handlers import LeaseOver, ends_process, meant_by
from notify.client.handling.runs import Holder, Run, Waiting, ranges_of
from notify.runtime.clock import boot_clock
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

IN_HAND = 1_000
"""The most messages in hand of a consumer whose `batch` is not set."""
IN_HAND_BYTES = 32 << 20
"""No more is asked for while the bodies in hand have more bytes, unless a handler would be idle."""
AHEAD_SECONDS = 1.0
"""The messages in hand are about as many as the handlers finish in this time."""
PACE_SECONDS = 0.1
"""The pace of the handlers is measured over this time, or over as many messages as may be in hand."""
SHORTEST_SECONDS = 0.001
GATHER_SECONDS = 0.005
"""How long what was noted waits for more while further messages wait for their handlers."""
GATHERED = 4
"""A run of at least this fraction of the most in hand (one part in this many) does not wait for more."""
CAUTIOUS = 32
"""The messages in hand of a consumer that has just begun, and of one to which mostly repeated deliveries come. If the
process dies, that counts as a death for each message in hand, and one of them may be what kills the process."""
TURN_SECONDS = 0.001
"""After this time of quick handlers the other tasks of an event loop, and other greenlets, get their turn."""
START_SECONDS = 1.0
"""When a thread is started again that the system refused."""


_forks = 0
"""How many forks lie between this process and the one that has imported this module."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that a handler has forked, and that came back from the handler. It has its parent's messages and
    connections, and would handle and settle what its parent does."""
    log.warning("a handler has forked: its child ends where the handler ends; call os._exit where its work is done")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0 if error is None else 1)


class Call(Struct):
    """The call of a handler for a message; times of `perf_counter`, 0: it does not count as one of the handler."""

    run: Run
    place: int
    began: float
    ended: float = 0.0
    error: BaseException | None = None
    """The exception that the handler raised."""
    is_last: bool = False
    """Whether its caller makes no further call."""


class Hand:
    """The messages in hand of one consumer, from all its servers. Belongs to an event loop; `began`, `has_waiting`,
    `calls`, `take`, `note` and `left` are for the callers of handlers, in any thread.

    At most `at_once` callers of handlers take messages from the hand, until none waits. One of them is always about to
    take what lies behind the calls that are running, so that no message waits for a call of another caller, and many
    quick calls are made by one caller.
    """

    def __init__(
        self,
        start: Callable[[], None],
        counted: Callable[[int, BaseException | None], None],
        at_once: int,
        least: int,
        most: int | None = None,
    ) -> None:
        """`start` starts another caller; it raises RuntimeError if the system allows no thread. `counted` gets the
        number of messages whose handler has returned, with the error that it raised. `least`: the messages in hand of
        slow handlers; `most`: the messages in hand of handlers however slow or quick; None: they follow the pace."""
        self._start = start
        self._counted = counted
        self._at_once = at_once
        self._least, self._most = (least, max(IN_HAND, least)) if most is None else (most, most)
        self._loop = asyncio.get_running_loop()
        self._forks = _forks
        self.clock = time.perf_counter
        """The clock of calls."""
        self.lease_clock = boot_clock
        """The clock of leases, which continues while a machine sleeps."""
        self._singles: deque[Waiting] = deque()
        """The messages that wait for handlers of single messages. Callers take them without the lock."""
        self._batches: dict[str, deque[Waiting]] = {}
        """The messages that wait for handlers of batches, by topic; the topics take turns in the order of this dict."""
        self._lock = threading.Lock()
        self._callers = 0
        self._is_starting = False
        """Whether a caller is started that has not taken anything yet."""
        self._is_over = self._is_closed = False
        self._noted: deque[Call] = deque()
        """The calls that have ended since the loop last looked."""
        self._is_collect_due = False
        """Whether the loop will look at what was noted."""
        self._gathering: asyncio.TimerHandle | None = None
        self.count = 0
        """The messages in hand: received, and not settled."""
        self._bytes = 0
        self._open = 0
        """The messages that wait or whose handlers are running."""
        self.moved = asyncio.Event()
        """Set when there is room again; a session clears it before it waits."""
        self._limit: int | None = 1
        """The most messages in hand of a cautious consumer; None: it is not. Its first request brings one message; if
        that comes again, the limit doubles each time as many are handled, so that what kills the process is soon alone.
        """
        self._survived = 0
        """The number of messages handled since the limit was set."""
        self._pace = 0.0
        """Messages that the handlers finish in a second."""
        self._busy_from = 0.0
        self._busy_seconds, self._measured = 0.0, 0
        """How long messages were in hand since the last measurement of the pace, and how many were handled."""

    # --- how much ---------------------------------------------------------------------------------------------

    @property
    def most(self) -> int:
        """The most messages to hold now."""
        most = min(self._most, max(self._least, round(self._pace * AHEAD_SECONDS)))
        return most if self._limit is None else min(most, self._limit)

    def room(self, *, is_near: bool = False) -> int:
        """How many messages to ask for now; 0 until there is room for half of those that may be in hand. `is_near`:
        they come at once, without a request: room for a quarter is enough, or for one if none waits."""
        if self.count:
            self._count_busy()
        if self._busy_seconds >= PACE_SECONDS or self._measured >= self.most:
            pace = min(self._measured / max(self._busy_seconds, SHORTEST_SECONDS), self._most / AHEAD_SECONDS)
            self._pace = (self._pace + pace) / 2 if self._pace else pace
            self._busy_seconds, self._measured = 0.0, 0
        if is_near:
            return self._room(4 if self.has_waiting else self.most)
        return self._room()

    def _count_busy(self) -> None:
        now = self._loop.time()
        self._busy_seconds += now - self._busy_from
        self._busy_from = now

    def _bounded(self) -> int:
        """The most messages to hold now, with the bound of their bytes."""
        return min(self.most, self._at_once) if self._bytes >= IN_HAND_BYTES else self.most

    def _room(self, part: int = 2) -> int:
        """The room in hand; 0 if it is less than one `part`-th of the most."""
        most = self._bounded()
        room = most - self.count
        return room if room >= max(1, most // part) else 0

    def put(self, runs: Sequence[Run]) -> None:
        """Take the runs of one reply in hand, and have their handlers called."""
        if not self.count:
            self._busy_from = self._loop.time()  # idle time is not slowness
        messages = [message for run in runs for message in run.messages if message is not None]
        self.count += len(messages)
        self._open += len(messages)
        self._bytes += sum([sum(run.sizes) for run in runs])
        if 2 * sum([message.attempt > 1 for message in messages]) > len(messages):
            if self._limit is None:
                self._limit, self._survived = CAUTIOUS, 0
        elif messages:
            self._limit = CAUTIOUS if self._limit is not None and self._limit < CAUTIOUS else None
        with self._lock:
            for run in runs:
                handler = run.handler
                line = self._singles
                if handler is not None and handler.batch is not None:
                    line = self._batches.setdefault(handler.topic, deque())
                line.extend(zip(repeat(run), range(len(run.messages))))
        self.wake()

    def settled(self, run: Run, places: range) -> None:
        """These messages are no longer in hand."""
        self._bytes -= run.settled(places)
        self.count -= len(places)
        if not self.count:
            self._count_busy()
        if self._room():
            self.moved.set()

    # --- who handles ------------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether messages wait for their handlers, and handlers may be called."""
        return bool(self._singles or self._batches) and not self._is_over

    def wake(self) -> None:
        """Start another caller, if messages wait, there may be more callers, and none is about to take them."""
        if not self._lacks_caller():
            return
        with self._lock:
            if not self._lacks_caller():
                return
            self._callers += 1
            self._is_starting = True  # before its thread may have begun
            try:
                self._start()
            except RuntimeError as error:
                self._callers -= 1
                self._is_starting = False
                if not self._callers:
                    log.warning("no thread for a handler, again in %g s: %s", START_SECONDS, error)
                    self._loop.call_soon_threadsafe(self._loop.call_later, START_SECONDS, self.wake)

    def _lacks_caller(self) -> bool:
        return not self._is_starting and self._callers < self._at_once and self.has_waiting

    def began(self) -> None:
        """A caller that was started takes the waiting runs."""
        self._is_starting = False

    def calls(self) -> Iterator[Call]:
        """The calls to make of handlers of single messages, one by one, for a turn's time, while such messages
        wait, and no batches. When the next one is asked for, the handler of the last one has returned, or raised
        `error`.

        Each message goes through this: it takes no lock, and the clock is read once between two calls.
        """
        line, noted, clock = self._singles, self._noted, self.clock
        began, now_us = clock(), self.lease_clock()
        until = began + TURN_SECONDS
        while not self._is_over:
            try:
                run, place = line.popleft()
            except IndexError:
                return
            if line and not self._is_starting and self._callers < self._at_once:
                self.wake()
            if now_us >= run.until_us or not run.is_open[place]:  # `Run.may_begin`, without a call for each message
                self.note([(run, place)], LeaseOver())
                continue
            call = Call(run, place, began)
            yield call
            if self._forks != _forks:
                _end_child(call.error)
            began = call.ended = clock()
            if call.error is not None:
                call.error = self._meant(call.error)
            noted.append(call)  # from now on the loop may settle it
            if not self._is_collect_due:
                self._collect_soon()
            if began >= until or self._batches or call.is_last:
                return

    def lots(self) -> Iterator[list[Waiting]]:
        """The messages of calls of handlers of batches, one by one, for a turn's time, while such messages
        wait, and no single ones. The caller notes what became of each message."""
        until = self.clock() + TURN_SECONDS
        while lot := self.take():
            yield lot
            if self._singles or self.clock() >= until:
                return

    def take(self) -> list[Waiting]:
        """The messages for the next call of a handler of batches, at most as many as it takes; empty if none waits."""
        while lot := self._next_lot():
            now_us = self.lease_clock()
            over = [(run, place) for run, place in lot if not run.may_begin(place, now_us)]
            if not over:
                return lot
            self.note(over, LeaseOver())
            if len(over) < len(lot):
                return [waiting for waiting in lot if waiting not in over]
        return []

    def _next_lot(self) -> list[Waiting]:
        """The first messages that wait for a handler of batches.

        A message in its second or later attempt is alone. If it failed before, it may fail the batch again; and if the
        process dies with a batch, that counts as a death for each message of the batch.
        """
        batches = self._batches
        with self._lock:
            if not batches or self._is_over:
                return []
            topic = next(iter(batches))
            line = batches[topic]
            lot = [line.popleft()]
            run, place = lot[0]
            if run.handler is not None and run.message(place).attempt == 1:
                most = run.handler.batch or 1
                while line and len(lot) < most and line[0][0].message(line[0][1]).attempt == 1:
                    lot.append(line.popleft())
            if not line:
                del batches[topic]
            elif len(batches) > 1:
                batches[topic] = batches.pop(topic)  # after the others
        self.wake()
        return lot

    def left(self) -> None:
        """A caller takes nothing more."""
        with self._lock:
            self._callers -= 1
        if self._gathering is not None and not (self._singles or self._batches):
            self._call_on_loop(self.collect)  # there is nothing more to wait for
        self.wake()

    def let_go(self, holder: Holder, runs: Container[Run] | None = None) -> list[Waiting]:
        """Return what waits of a holder; no handler will get it. `runs`: only what waits of these."""
        gone: list[Waiting] = []
        with self._lock:
            for line in (self._singles, *self._batches.values()):
                waited: list[Waiting] = []
                with contextlib.suppress(IndexError):  # callers may take the last ones meanwhile
                    while True:
                        waited.append(line.pop())  # callers take from the other end, so that the order stays
                kept: list[Waiting] = []
                for waiting in reversed(waited):
                    goes = waiting[0].holder is holder and (runs is None or waiting[0] in runs)
                    (gone if goes else kept).append(waiting)
                line.extend(kept)
            for topic in [topic for topic, line in self._batches.items() if not line]:
                del self._batches[topic]
        self._open -= len(gone)
        self.wake()  # callers that found nothing meanwhile have left
        return gone

    def end(self) -> None:
        """Have no further handler called."""
        self._is_over = True

    @property
    def is_over(self) -> bool:
        """Whether no further handler is called."""
        return self._is_over

    def close(self) -> None:
        """End, and settle nothing more: a handler in a thread may continue."""
        self._is_over = self._is_closed = True

    @property
    def under_way(self) -> int:
        """The number of messages whose handlers are running, or were since the loop last looked."""
        return self._open - len(self._singles) - sum(map(len, list(self._batches.values())))

    # --- what became of it ------------------------------------------------------------------------------------

    def note(self, lot: Sequence[Waiting], error: BaseException | None = None, began: float = 0.0) -> None:
        """Note that the handler of these messages has returned, or that it raised an error. `began`: when it was called
        (`clock`); 0: the call does not count as one of the handler."""
        if self._forks != _forks:
            _end_child(error)
        ended = self.clock()
        if error is not None:
            error = self._meant(error)
        self._noted.extend([Call(run, place, began, ended, error) for run, place in lot])
        if not self._is_collect_due:
            self._collect_soon()

    def _meant(self, error: BaseException) -> BaseException:
        """The error that a handler means by the one that it raised. One that ends the process is the last call."""
        error = meant_by(error)
        if ends_process(error):
            self.end()
        return error

    def _collect_soon(self) -> None:
        self._is_collect_due = True
        self._call_on_loop(self._gather)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody settles any more
            self._loop.call_soon_threadsafe(callback)

    def _gather(self) -> None:
        """Settle what was noted, or wait a little for more, while no caller is idle: each request costs the server as
        much as many messages."""
        if self._limit is None and self.has_waiting and len(self._noted) * GATHERED < self.most:
            self._gathering = self._loop.call_later(GATHER_SECONDS, self.collect)
        else:
            self.collect()

    def collect(self) -> None:
        """Settle what was noted."""
        self._is_collect_due = False
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._is_closed:
            return
        noted, count = self._noted, len(self._noted)
        calls_by_run: dict[Run, list[Call]] = {}
        last: Run | None = None
        calls: list[Call] = []
        for _ in range(count):
            call = noted.popleft()
            if call.run is not last:
                last = call.run
                calls = calls_by_run.setdefault(last, [])
            calls.append(call)
        self._open -= count
        self._measured += count
        self._survived += count
        if self._limit is not None and self._survived >= self._limit:
            self._limit, self._survived = self._limit * 2, 0
        for run, calls in calls_by_run.items():
            self._collect(run, calls)

    def _collect(self, run: Run, calls: list[Call]) -> None:
        """Have calls of a run settled."""
        timed = [call for call in calls if call.began]
        if timed:
            run.holder.times.add(
                run, [call.place for call in timed], [call.began for call in timed],
                [call.ended - call.began for call in timed],
            )  # fmt: skip
        returned = ranges_of([call.place for call in calls if call.error is None])
        if count := sum(map(len, returned)):
            self._counted(count, None)
        for places in returned:
            run.close(places)
        for call in calls:
            if call.error is not None:
                error, call.error = call.error, None  # its frames have the call
                run.close(range(call.place, call.place + 1))
                self._counted(1, error)
                run.holder.noted(run, call.place, error)
        run.holder.settle_noted(run, returned)
