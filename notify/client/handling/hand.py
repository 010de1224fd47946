"""Hand: what a consumer has in hand, from the reply to the settle: runs of messages, those that wait, and their fates.

The handlers' threads and coroutines take messages from here and note here what became of them. A session of one queue
server (client/consumer/session.py) puts runs in, and settles what was noted; over Kafka client/kafka/handling.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

from notify.client.bodies.reading import ReadMessage
from notify.client.handling.handlers import Handler, NotTried, Partial, handler_of, meant_by, reason_of
from notify.client.handling.typed import Decoded, Read, calling
from notify.protocol.latency import HANDLED, SLOWEST, WAITED, Histogram, written, written_slowest
from notify.protocol.limits import digits
from notify.protocol.message import ReceivedMessage, received
from notify.protocol.wire import Delivered
from notify.protocol.withdrawal import without_own
from notify.runtime import tracing
from notify.runtime.visible import one_line

log = logging.getLogger("notify.consumer")

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
"""A part of one in so many of the most in hand does not wait for more."""
CAUTIOUS = 32
"""The messages in hand of a consumer that has just begun, and of one to which mostly repeated deliveries come. If the
process dies, that counts as a death for each message in hand, and one of them may be what kills the process."""
START_SECONDS = 1.0
"""When a thread is started again that the system refused."""


class Holder(Protocol):
    """A session of a queue server, or Kafka's Handling: it received runs of messages, and settles them."""

    times: Times
    """Counts how long its messages waited, and their handlers took."""

    def noted(self, run: Run, place: int, error: BaseException) -> None:
        """The handler of a message of a run has raised an error."""

    def settle_noted(self, run: Run) -> None:
        """Acknowledge the messages of a run whose handlers have returned."""


class Times:
    """How long messages waited in hand, and their handlers took."""

    __slots__ = ("_slowest_trace", "_slowest_us", "handled", "waited")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.waited, self.handled = Histogram(), Histogram()
        self._slowest_us, self._slowest_trace = -1, ""

    def add(self, run: Run, place: int, count: int, began: float, ended: float) -> None:
        """Count a call of a handler with so many messages of a run, the first of them at `place`; times of
        `perf_counter`."""
        handled_us = int((ended - began) * 1e6)
        self.waited.add(int((began - run.began) * 1e6), count)
        self.handled.add(handled_us, count)
        if handled_us > self._slowest_us:
            headers = run.delivery(place).headers
            if headers and (trace_id := tracing.trace_id(headers)):
                self._slowest_us, self._slowest_trace = handled_us, trace_id

    def taken(self) -> str:
        """The counts since the last call, as the query of a settlement; empty if there are none."""
        if not any(self.handled.counts):
            return ""
        query = f"?{WAITED}={written(self.waited)}&{HANDLED}={written(self.handled)}"
        if self._slowest_trace:
            query += f"&{SLOWEST}={written_slowest(self._slowest_us, self._slowest_trace)}"
        self._reset()
        return query


class Run:
    """Messages of one lease, and so of one queue, in their order. Changed only on the event loop."""

    __slots__ = ("acknowledged", "began", "deliveries", "first", "handler", "holder", "is_open", "lease", "unsettled")

    def __init__(
        self, holder: Holder, handler: Handler | None, lease: str, first: int, deliveries: list[Delivered | None]
    ) -> None:
        self.holder = holder
        self.handler = handler
        self.lease = lease
        self.first = first
        """The place in the lease of the first message."""
        self.deliveries = deliveries
        """The messages by place; None: settled."""
        self.is_open = bytearray(b"\1") * len(deliveries)
        """By place, whether the message still waits, or its handler is running."""
        self.acknowledged: list[int] = []
        """The places of messages whose acknowledgements are to be sent."""
        self.unsettled = len(deliveries)
        self.began = time.perf_counter()
        """When it came to this consumer."""

    def delivery(self, place: int) -> Delivered:
        """A message that is not settled yet."""
        delivery = self.deliveries[place]
        assert delivery is not None
        return delivery

    def receipt(self, places: range) -> str:
        """The receipt of one message, or of several that lie side by side."""
        if len(places) == 1:
            return self.delivery(places[0]).receipt
        return f"{self.lease}.{self.first + places[0]}-{self.first + places[-1]}"

    def open_places(self) -> list[int]:
        """The places of messages whose handlers have not returned."""
        return [place for place, is_open in enumerate(self.is_open) if is_open]


Waiting = tuple[Run, int]
"""A message that waits for its handler: its run, and its place there."""


def runs_of(holder: Holder, handlers: Mapping[str, Handler], deliveries: Sequence[Delivered]) -> list[Run]:
    """The runs of a reply: neighbours whose receipts are `lease.place`, `lease.place + 1`, and so on."""
    found: list[tuple[str, int, list[Delivered | None]]] = []
    lease: str = ""
    following: int | None = None
    for delivery in deliveries:
        name, _, text = delivery.receipt.rpartition(".")
        place = digits(text)  # None: a receipt of another form names this message alone
        if place is not None and (name, place) == (lease, following):
            found[-1][2].append(delivery)
        else:
            found.append((name, place or 0, [delivery]))
        lease, following = name, None if place is None else place + 1
    topics = [run[0].topic for _, _, run in found if run[0] is not None]
    return [Run(holder, handler_of(handlers, topic), *parts) for topic, parts in zip(topics, found, strict=True)]


def ranges_of(places: Iterable[int]) -> list[range]:
    """The ranges that cover these places."""
    ranges: list[range] = []
    for place in sorted(places):
        if ranges and ranges[-1].stop == place:
            ranges[-1] = range(ranges[-1].start, place + 1)
        else:
            ranges.append(range(place, place + 1))
    return ranges


def message_of(waiting: Waiting) -> ReceivedMessage:
    """The message as its handler gets it."""
    run, place = waiting
    d = run.deliveries[place]
    assert d is not None
    headers = without_own(d.headers) if d.headers else {}
    return received(
        d.id, d.topic, d.queue, d.offset, d.body, d.key, d.tag, headers, d.attempt, d.committed_at, d.replay
    )


class Hand:
    """The messages in hand of one consumer, from all its servers. Belongs to an event loop; `take`, `note`, `began` and
    `left` may be called by any thread.

    At most `at_once` callers of handlers take lots from the hand, until nothing waits. One of them is always about to
    take what lies behind the calls that are running, so that no message waits for a call of another caller, and a lot
    of quick calls is made by one caller.
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
        self.time = self._loop.time
        """The clock of the loop, for any thread."""
        self._lines: dict[str, deque[Waiting]] = {}
        """The messages that wait for a handler of batches, by its topic, and those for all other handlers, by "". They
        take turns in the order of this dict."""
        self._lock = threading.Lock()
        self._callers = 0
        self._is_starting = False
        """Whether a caller is started that has not taken anything yet."""
        self._is_over = self._is_closed = False
        self._returns: deque[tuple[list[Waiting], float, float]] = deque()
        self._errors: deque[tuple[list[Waiting], float, float, BaseException]] = deque()
        """The messages of calls that returned, and those of calls that raised an error, which callers have noted since
        the loop last looked, with the times at which the calls began and ended."""
        self._is_told = False
        """Whether the loop will look at what was noted."""
        self._gathering: asyncio.TimerHandle | None = None
        self.count = 0
        """The messages in hand: received, and not settled."""
        self._bytes = 0
        self._taken = self._returned = 0
        """The messages that callers have taken, and those of them whose handlers have returned."""
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

    def room(self) -> int:
        """How many messages to ask for now; 0 until there is room for half of those that may be in hand."""
        self._measure()
        return self._room()

    def free(self) -> int:
        """How many messages more may be in hand now."""
        self._measure()
        return max(0, self._bounded() - self.count)

    def _measure(self) -> None:
        if self.count:
            self._count_busy()
        if self._busy_seconds >= PACE_SECONDS or self._measured >= self.most:
            pace = min(self._measured / max(self._busy_seconds, SHORTEST_SECONDS), self._most / AHEAD_SECONDS)
            self._pace = (self._pace + pace) / 2 if self._pace else pace
            self._busy_seconds, self._measured = 0.0, 0

    def _count_busy(self) -> None:
        now = self._loop.time()
        self._busy_seconds += now - self._busy_from
        self._busy_from = now

    def _bounded(self) -> int:
        """The most messages to hold now, with the bound of their bytes."""
        return min(self.most, self._at_once) if self._bytes >= IN_HAND_BYTES else self.most

    def _room(self) -> int:
        most = self._bounded()
        room = most - self.count
        return room if room >= max(1, most // 2) else 0

    def put(self, runs: Sequence[Run]) -> None:
        """Take the runs of one reply in hand, and have their handlers called."""
        if not self.count:
            self._busy_from = self._loop.time()  # idle time is not slowness
        deliveries = [delivery for run in runs for delivery in run.deliveries if delivery is not None]
        self.count += len(deliveries)
        self._bytes += sum([len(delivery.body) for delivery in deliveries])
        if 2 * sum([delivery.attempt > 1 for delivery in deliveries]) > len(deliveries):
            if self._limit is None:
                self._limit, self._survived = CAUTIOUS, 0
        elif deliveries:
            self._limit = CAUTIOUS if self._limit is not None and self._limit < CAUTIOUS else None
        with self._lock:
            for run in runs:
                handler = run.handler
                topic = "" if handler is None or handler.batch is None else handler.topic
                line = self._lines.setdefault(topic, deque())
                line.extend(zip(repeat(run), range(len(run.deliveries))))
        self.wake()

    def settled(self, run: Run, places: Iterable[int]) -> None:
        """These messages are no longer in hand."""
        deliveries = run.deliveries
        freed = count = 0
        for place in places:
            delivery = deliveries[place]
            assert delivery is not None
            freed += len(delivery.body)
            deliveries[place] = None
            count += 1
        run.unsettled -= count
        self._bytes -= freed
        self.count -= count
        if not self.count:
            self._count_busy()
        if self._room():
            self.moved.set()

    # --- who handles ------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start another caller, if messages wait, there may be more callers, and none is about to take them."""
        if self._is_starting or self._callers >= self._at_once or not self._lines:
            return
        with self._lock:
            if self._is_starting or self._callers >= self._at_once or not self._lines or self._is_over:
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

    def began(self) -> None:
        """A caller that was started goes on to take what waits."""
        self._is_starting = False

    def take(self) -> list[Waiting]:
        """The messages for the next call of a handler, at most as many as it takes; empty if none waits.

        A message in its second or later attempt is alone. If it failed before, it may fail the batch again; and if the
        process dies with a batch, that counts as a death for each message of the batch.
        """
        lines = self._lines
        with self._lock:
            if not lines or self._is_over:
                return []
            topic = next(iter(lines))
            line = lines[topic]
            lot = [line.popleft()]
            if topic:
                run, place = lot[0]
                if run.handler is not None and run.delivery(place).attempt == 1:
                    most = run.handler.batch or 1
                    while line and len(lot) < most and line[0][0].delivery(line[0][1]).attempt == 1:
                        lot.append(line.popleft())
            if not line:
                del lines[topic]
            elif len(lines) > 1:
                lines[topic] = lines.pop(topic)  # behind the others
            self._taken += len(lot)
            is_enough = self._is_starting or self._callers >= self._at_once
        if lines and not is_enough:
            self.wake()
        return lot

    def left(self) -> None:
        """A caller takes nothing more."""
        with self._lock:
            self._callers -= 1
        if self._gathering is not None and not self._lines:
            self._tell(self.collect)  # there is nothing more to wait for
        self.wake()

    def let_go(self, holder: Holder, runs: Container[Run] | None = None) -> list[Waiting]:
        """Return what waits of a holder; no handler will get it. `runs`: only what waits of these."""
        gone: list[Waiting] = []

        def goes(waiting: Waiting) -> bool:
            return waiting[0].holder is holder and (runs is None or waiting[0] in runs)

        with self._lock:
            for topic, line in list(self._lines.items()):
                gone += [waiting for waiting in line if goes(waiting)]
                kept = deque([waiting for waiting in line if not goes(waiting)])
                if kept:
                    self._lines[topic] = kept
                else:
                    del self._lines[topic]
        return gone

    def end(self) -> None:
        """Have no further handler called."""
        self._is_over = True

    @property
    def is_over(self) -> bool:
        """Whether no further handler is called."""
        return self._is_over

    def close(self) -> None:
        """End, and settle nothing more: a handler in a thread may go on."""
        self._is_over = self._is_closed = True

    @property
    def under_way(self) -> int:
        """The number of messages whose handlers are running."""
        return self._taken - self._returned

    # --- what became of it ------------------------------------------------------------------------------------

    def note(self, lot: list[Waiting], error: BaseException | None = None, began: float = 0.0) -> None:
        """Note that the handler of these messages has returned, or that it raised an error. `began`: when it was called
        (`perf_counter`); 0: the call does not count as one of the handler."""
        ended = time.perf_counter()
        if error is None:
            self._returns.append((lot, began, ended))
        else:
            error = meant_by(error)
            if not isinstance(error, Exception | asyncio.CancelledError):
                self.end()  # the handler ends the process: none is called after it
            self._errors.append((lot, began, ended, error))
        if not self._is_told:
            self._is_told = True
            self._tell(self._gather)

    def _tell(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody settles any more
            self._loop.call_soon_threadsafe(callback)

    def _gather(self) -> None:
        """Settle what was noted, or wait a little for more, while no caller is idle: each request costs the server as
        much as many messages."""
        if self._limit is None and self._lines and (len(self._returns) + len(self._errors)) * GATHERED < self.most:
            self._gathering = self._loop.call_later(GATHER_SECONDS, self.collect)
        else:
            self.collect()

    def collect(self) -> None:
        """Settle what was noted."""
        self._is_told = False
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._is_closed:
            return
        noted_runs: dict[Run, None] = {}
        last: Run | None = None
        count = 0
        returns, errors = self._returns, self._errors
        while returns:
            lot, began, ended = returns.popleft()
            count += len(lot)
            if began:
                _count_times(lot, began, ended)
            for run, place in lot:
                run.is_open[place] = 0
                run.acknowledged.append(place)
                if run is not last:
                    noted_runs[run] = None
                    last = run
        if count:
            self._counted(count, None)
        while errors:
            lot, began, ended, error = errors.popleft()
            count += len(lot)
            if began:
                _count_times(lot, began, ended)
            self._counted(len(lot), error)
            for run, place in lot:
                run.is_open[place] = 0
                run.holder.noted(run, place, error)
                noted_runs[run] = None
        self._returned += count
        self._measured += count
        self._survived += count
        if self._limit is not None and self._survived >= self._limit:
            self._limit, self._survived = self._limit * 2, 0
        for run in noted_runs:
            run.holder.settle_noted(run)


class Batch:
    """Messages that are handled in one call, and in several if that fails: each has its own fate.

    A call that fails is made for the two halves of its messages, in their order, and so on down to single messages.
    """

    def __init__(self, hand: Hand, lot: list[Waiting], messages: Sequence[ReadMessage]) -> None:
        """`messages`: those of the lot, each with its body, or the error that reading it raised."""
        handler = lot[0][0].handler
        assert handler is not None
        self._hand = hand
        self._handler = handler
        self._lot: list[Waiting] = []
        self._messages: list[ReceivedMessage] = []
        for waiting, message in zip(lot, messages, strict=True):
            if isinstance(message, Exception):
                hand.note([waiting], message)
            else:
                self._lot.append(waiting)
                self._messages.append(message)
        self._decoded: list[Decoded] = []
        """The messages with their bodies, if the handler takes decoded ones."""
        self._part = range(0)
        """The places in the lot of the messages of this call."""
        self._began = 0.0
        if handler.read is not None:
            self._decode(handler.read)
        self._parts = [range(len(self._lot))]

    def _decode(self, read: Read) -> None:
        """Decode the bodies. A body that does not fit is a dead letter, whatever the others are."""
        lot, self._lot = self._lot, []
        for number, (waiting, message) in enumerate(zip(lot, self._messages, strict=True)):
            try:
                self._decoded.append(Decoded(message, read(message)))
            except Exception as error:
                self._hand.note([waiting], error)
            except BaseException as error:
                self._hand.note([waiting], error)
                self._hand.note(self._lot + lot[number + 1 :], NotTried(error))
                self._lot = []
                break
            else:
                self._lot.append(waiting)
        self._messages = [decoded.message for decoded in self._decoded]

    def next(self) -> bool:
        """Go on to the messages of the next call; False if there are none."""
        self._part = self._parts.pop() if self._parts else range(0)
        self._began = time.perf_counter()
        return len(self._part) > 0

    @property
    def messages(self) -> list[ReceivedMessage]:
        """The messages of this call."""
        return self._messages[_slice(self._part)]

    @property
    def function(self) -> Callable[..., Any]:
        """The handler as a function of messages, which decodes their bodies if it takes decoded ones."""
        handler = self._handler
        if handler.read is None:
            return handler.call
        return calling(handler.call, handler.read, self._decoded[_slice(self._part)])

    def succeeded(self) -> None:
        """This call has returned."""
        self._hand.note(self._lot[_slice(self._part)], began=self._began)

    def failed(self, error: BaseException) -> None:
        """This call has raised an error."""
        part = self._part
        if isinstance(error, NotTried):
            self.cut(error)
        elif len(part) == 1 or isinstance(error, Partial):  # the halves of a Partial would count as handled
            self._hand.note(self._lot[_slice(part)], error, self._began)
        elif not isinstance(error, Exception | asyncio.CancelledError):
            self._hand.end()  # SystemExit or KeyboardInterrupt ends the process, whichever message caused it
            self.cut(NotTried(error))
        else:
            log.info(
                "the handler of %s failed on %d messages, and gets them in two halves: %s",
                self._handler.topic, len(part), one_line(reason_of(error)),
            )  # fmt: skip
            middle = len(part) // 2
            self._parts += [part[middle:], part[:middle]]

    def cut(self, error: BaseException) -> None:
        """Call the handler no more: note the error for all messages that are not done."""
        for part in (self._part, *reversed(self._parts)):
            if part:
                self._hand.note(self._lot[_slice(part)], error)
        self._parts.clear()


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)


def _count_times(lot: Sequence[Waiting], began: float, ended: float) -> None:
    run, place = lot[0]
    if lot[-1][0] is run:
        run.holder.times.add(run, place, len(lot), began, ended)
    else:
        for run, places in by_run(lot):
            run.holder.times.add(run, places[0], len(places), began, ended)


def by_run(waiting: Iterable[Waiting]) -> Iterator[tuple[Run, list[int]]]:
    """The places of waiting messages, by run."""
    places_by_run: dict[Run, list[int]] = {}
    for run, place in waiting:
        places_by_run.setdefault(run, []).append(place)
    yield from places_by_run.items()
