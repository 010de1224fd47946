"""Batches: messages whose handler takes several are gathered, handled in one call, and told apart where that fails.

Each message waits for its own fate, as if it were handled alone: leases, settling, attempts and dead letters are those
of single messages, on a queue server as over Kafka.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notify.client.claims import Partial
from notify.client.handlers import Handler, NotTried, is_cancelled, reason_of
from notify.client.typed import Read
from notify.message import ReceivedMessage
from notify.visible import one_line

log = logging.getLogger("notify.consumer")

CANCEL_SECONDS = 1.0
"""How long coroutines that are cancelled may take to end."""
Call = Callable[[Sequence[ReceivedMessage], Callable[..., Any]], Awaitable[None]]
"""Handles messages, some of which an inbox may leave out, with a function of messages and a session."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A message that is to be handled. `value`: its decoded body, until a call has had it."""

    message: ReceivedMessage
    value: Any
    fate: asyncio.Future[None]
    batch: Batch | None = None
    """The batch that it is handled in, once that has begun."""

    def take_value(self, read: Read) -> Any:
        """The decoded body, new for each call: the handler may have changed the one that it failed with."""
        value, self.value = self.value, None
        return read(self.message) if value is None else value


@dataclass(slots=True, eq=False)
class Batch:
    """Messages that are handled in one call at first."""

    handler: Handler
    arrivals: list[Arrival]
    task: asyncio.Task[None] | None = None


class Gathering:
    """Batches of one consumer, at most `concurrency` at a time. Belongs to the event loop that it is made on.

    No linger: what waits when there is room for a batch goes into it, so that batches grow while handlers are slow.
    """

    def __init__(self, call: Call, concurrency: int) -> None:
        self._call = call
        self._concurrency = concurrency
        self._waiting: dict[str, tuple[Handler, deque[Arrival]]] = {}
        """By the handlers' topics, which have their turns in this order."""
        self._running: set[asyncio.Task[None]] = set()
        self._is_scheduled = False
        self._ended: BaseException | None = None
        """SystemExit or the like, which a handler of a batch has raised."""
        self._loop = asyncio.get_running_loop()

    async def handle(self, handler: Handler, message: ReceivedMessage) -> None:
        """Return when a message was handled, in whichever batch. Raises what its handler raised for it alone.

        Raises DeadLetter where its body does not fit what the handler takes: it is in no batch then.
        """
        if self._ended is not None:
            raise NotTried(self._ended)
        value = message if handler.read is None else handler.read(message)
        arrival = Arrival(message, value, self._loop.create_future())
        arrival.fate.add_done_callback(_look)
        self._waiting.setdefault(handler.topic, (handler, deque()))[1].append(arrival)
        if not self._is_scheduled:
            # Messages that came together are all here by then.
            self._is_scheduled = True
            self._loop.call_soon(self._begin)
        try:
            await arrival.fate
        except asyncio.CancelledError as error:
            batch = arrival.batch
            if batch is None:
                raise NotTried(error) from None
            if batch.task is not None and all(a.fate.cancelled() for a in batch.arrivals):
                batch.task.cancel()  # nobody waits for it any more
            raise

    def _begin(self) -> None:
        self._is_scheduled = False
        while self._waiting and len(self._running) < self._concurrency:
            batch = self._take()
            if batch.arrivals:
                batch.task = self._loop.create_task(self._run(batch))
                self._running.add(batch.task)
                batch.task.add_done_callback(self._put_down)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._begin()

    def _take(self) -> Batch:
        """The next batch; it is empty where nobody waits for its messages any more.

        A message that failed before, or whose process died with it, is alone: in a batch it would be a suspect again,
        and a process that dies with a batch counts an attempt of each of its messages.
        """
        topic = next(iter(self._waiting))
        handler, line = self._waiting.pop(topic)
        assert handler.batch is not None
        batch = Batch(handler, [])
        while line and len(batch.arrivals) < handler.batch:
            if batch.arrivals and line[0].message.attempt > 1:
                break
            arrival = line.popleft()
            if not arrival.fate.done():
                arrival.batch = batch
                batch.arrivals.append(arrival)
                if arrival.message.attempt > 1:
                    break
        if line:
            self._waiting[topic] = handler, line  # behind the others
        return batch

    async def _run(self, batch: Batch) -> None:
        """Handle a batch; while that fails, its halves, in the messages' order, down to those that fail alone."""
        parts = [batch.arrivals]
        try:
            while parts:
                part = [arrival for arrival in parts.pop() if not arrival.fate.done()]
                if part:
                    parts += reversed(await self._handle(batch.handler, part))
        except BaseException as error:
            if is_cancelled(error):
                raise
            self._end(batch, error)
        finally:
            for arrival in batch.arrivals:
                arrival.fate.cancel()

    def _end(self, batch: Batch, error: BaseException) -> None:
        """The process is to end: no handler is called any more, and what has not begun is given back, too."""
        self._ended = error
        for arrivals in (batch.arrivals, *(line for _, line in self._waiting.values())):
            _fail(arrivals, NotTried(error))
        self._waiting.clear()

    async def _handle(self, handler: Handler, part: list[Arrival]) -> list[list[Arrival]]:
        """Handle messages in one call. Where that fails: the halves to be tried, and of one message nothing."""
        try:
            await self._call([arrival.message for arrival in part], _function_of(handler, part))
        except BaseException as error:
            if is_cancelled(error):
                raise
            if isinstance(error, Partial):
                _fail(part, error)  # the halves would count as handled
                return []
            if len(part) > 1 and not isinstance(error, Exception | asyncio.CancelledError):
                raise  # the process is to end, for whichever of them
            if len(part) > 1:
                log.info(
                    "the handler of %s failed on %d messages, and gets them in two halves: %s",
                    handler.topic, len(part), one_line(reason_of(error)),
                )  # fmt: skip
                middle = len(part) // 2
                return [part[:middle], part[middle:]]
            _fail(part, error)
            return []
        for arrival in part:
            if not arrival.fate.done():
                arrival.fate.set_result(None)
        return []

    async def close(self) -> None:
        """Wait no longer for batches under way, which nobody waits for."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_SECONDS)


def _fail(arrivals: Iterable[Arrival], error: BaseException) -> None:
    """Tell those who still wait for these messages that they failed."""
    for arrival in arrivals:
        if not arrival.fate.done():
            arrival.fate.set_exception(error)


def _look(fate: asyncio.Future[None]) -> None:
    """Who waited may be cancelled by now, and would leave an exception unseen, which asyncio would report."""
    if not fate.cancelled():
        fate.exception()


def _function_of(handler: Handler, part: Sequence[Arrival]) -> Callable[..., Any]:
    """The handler as a function of messages."""
    if handler.read is None:
        return handler.call
    return functools.partial(_call_with_values, handler.call, handler.read, {id(a.message): a for a in part})


def _call_with_values(
    call: Callable[..., Any],
    read: Read,
    arrivals: Mapping[int, Arrival],
    messages: Sequence[ReceivedMessage],
    *session: Any,
) -> Any:
    return call([arrivals[id(message)].take_value(read) for message in messages], *session)
