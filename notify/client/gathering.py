"""Gathering: collects messages into batches for a handler of batches, and splits a batch whose call fails.

Each message gets its own result, as if it were handled alone. Attempts, commits and dead letters over Kafka are
therefore those of single messages. What comes from a queue server is in runs instead (client/hand.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from notify.client.claims import Partial
from notify.client.handlers import CANCEL_SECONDS, Handler, NotTried, is_cancelled, reason_of
from notify.client.typed import Decoded, calling
from notify.message import ReceivedMessage
from notify.visible import one_line

log = logging.getLogger("notify.consumer")

Call = Callable[[Sequence[ReceivedMessage], Callable[..., Any]], Awaitable[None]]
"""Calls a function with messages and a session; an inbox may leave out messages that have taken effect already."""


class Arrival(Decoded):
    """A message that waits to be handled."""

    __slots__ = ("batch", "fate")

    def __init__(self, message: ReceivedMessage, value: Any, fate: asyncio.Future[None]) -> None:
        super().__init__(message, value)
        self.fate = fate
        self.batch: Batch | None = None
        """The batch that handles the message, once the batch has begun."""


@dataclass(slots=True, eq=False)
class Batch:
    """Messages that are handled in one call, and in several if that fails."""

    handler: Handler
    arrivals: list[Arrival]
    task: asyncio.Task[None] | None = None


class Gathering:
    """The batches of one consumer, at most `concurrency` at a time. Belongs to the event loop that it is made on.

    There is no linger time: a batch takes the messages that wait when it begins, so that batches grow while handlers
    are slow.
    """

    def __init__(self, call: Call, concurrency: int) -> None:
        self._call = call
        self._concurrency = concurrency
        self._waiting: dict[str, tuple[Handler, deque[Arrival]]] = {}
        """The waiting messages of each handler, by topic; topics take turns in the order of this dict."""
        self._running: set[asyncio.Task[None]] = set()
        self._is_scheduled = False
        self._ended: BaseException | None = None
        """SystemExit or another BaseException that a handler of a batch has raised."""
        self._loop = asyncio.get_running_loop()

    async def handle(self, handler: Handler, message: ReceivedMessage) -> None:
        """Wait until a batch has handled the message. Raises the exception that the handler raised for this message
        alone.

        Raises DeadLetter if the body does not fit the handler's annotation; the message is in no batch then.
        """
        if self._ended is not None:
            raise NotTried(self._ended)
        value = message if handler.read is None else handler.read(message)
        arrival = Arrival(message, value, self._loop.create_future())
        arrival.fate.add_done_callback(_retrieve)
        self._waiting.setdefault(handler.topic, (handler, deque()))[1].append(arrival)
        if not self._is_scheduled:
            # A later turn of the loop begins the batch, once all messages of the same delivery are here.
            self._is_scheduled = True
            self._loop.call_soon(self._begin)
        try:
            await arrival.fate
        except asyncio.CancelledError as error:
            batch = arrival.batch
            if batch is None:
                raise NotTried(error) from None
            if batch.task is not None and all(a.fate.cancelled() for a in batch.arrivals):
                batch.task.cancel()  # all its messages are cancelled
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
        """The next batch; it is empty if all its messages were cancelled.

        A message in its second or later attempt is a batch of its own. If it failed before, it may fail the batch
        again; and if the process dies with a batch, each message of the batch has used up an attempt.
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
        """Handle a batch. If the call fails, handle its two halves, in order, and so on down to single messages."""
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
        """A handler ends the process: call no more handlers, and give back all messages that wait."""
        self._ended = error
        for arrivals in (batch.arrivals, *(line for _, line in self._waiting.values())):
            _fail(arrivals, NotTried(error))
        self._waiting.clear()

    async def _handle(self, handler: Handler, part: list[Arrival]) -> list[list[Arrival]]:
        """Handle messages in one call. Returns the two halves to handle next if the call failed on several messages."""
        try:
            await self._call([arrival.message for arrival in part], _function_of(handler, part))
        except BaseException as error:
            if is_cancelled(error):
                raise
            if isinstance(error, Partial):
                _fail(part, error)  # the halves would count as handled
                return []
            if len(part) > 1 and not isinstance(error, Exception | asyncio.CancelledError):
                raise  # SystemExit or KeyboardInterrupt ends the process, whichever message caused it
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
        """Cancel the running batches, for whose results nobody waits any more."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_SECONDS)


def _fail(arrivals: Iterable[Arrival], error: BaseException) -> None:
    """Set the error as the result of the messages that have none yet."""
    for arrival in arrivals:
        if not arrival.fate.done():
            arrival.fate.set_exception(error)


def _retrieve(fate: asyncio.Future[None]) -> None:
    """Mark the exception as retrieved: otherwise asyncio reports it if the waiting task was cancelled."""
    if not fate.cancelled():
        fate.exception()


def _function_of(handler: Handler, part: Sequence[Arrival]) -> Callable[..., Any]:
    """The handler as a function of messages, which decodes their bodies if it takes decoded ones."""
    return handler.call if handler.read is None else calling(handler.call, handler.read, part)
