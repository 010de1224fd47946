"""Handling: runs handlers for records, and decides what becomes of each record: done, retried, or a dead letter."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from notify.client.failure_log import FailureLog
from notify.client.handlers import CANCEL_SECONDS, Handler, NotTried, handler_of, is_cancelled
from notify.client.kafka import retries
from notify.client.kafka.lot import Lot
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.plan import Plan
from notify.client.kafka.settling import Settling
from notify.client.kafka.window import Item, Window
from notify.clock import steady_clock
from notify.errors import DeadLetter, InvalidRequest
from notify.filter import Filter
from notify.kafka import records
from notify.kafka.groups import DEAD_LETTER, RETRY
from notify.message import REPLAY, ReceivedMessage

log = logging.getLogger("notify.consumer")

SKIPPED_AT_ONCE = 500
"""The most records without a handler that are skipped before the loop's other tasks get a turn."""
NAMED_IN_LOG = 10
LAST_MILLISECOND = 253_402_300_799_000
"""The last second of the year 9999."""


class Handling:
    """Handles at most `plan.at_once` messages at a time. Belongs to the event loop."""

    def __init__(self, plan: Plan, partitions: Partitions, settling: Settling, lot: Lot) -> None:
        """Raises InvalidRequest for an invalid filter."""
        self._plan = plan
        self._partitions = partitions
        self._settling = settling
        self._lot = lot
        self._failures = FailureLog()
        self._most = plan.at_once
        self._filters = {h.topic: Filter(h.filter) for h in plan.handlers.values() if h.filter}
        self._tasks: dict[asyncio.Task[None], tuple[Window, str]] = {}
        self._in_batches: set[asyncio.Task[None]] = set()
        """The tasks whose messages are in a batch, or wait for one."""
        self._singly = asyncio.Semaphore(plan.concurrency)
        """Bounds handlers of single messages, because with a handler of batches more messages have tasks."""
        self._timer: asyncio.TimerHandle | None = None
        self.moved = asyncio.Event()
        """Set when a handler has returned, and so few items are ready that more should be fetched."""
        self.noting = asyncio.Event()
        """Set when there is room for items whose attempts have to be noted first."""
        self.is_held = False
        """Whether no new handler may begin: the group is paused, or the consumer stops."""

    def begin(self) -> None:
        """Begin to handle ready items, while there is room."""
        skipped = 0
        while self.room:
            ready = self._partitions.take()
            if ready is None:
                break
            if not self._begin_one(*ready):
                skipped += 1
                if skipped == SKIPPED_AT_ONCE:
                    asyncio.get_running_loop().call_soon(self.begin)
                    break
        if self._partitions.has_to_note and self.room:
            self.noting.set()
        self._wait_for_the_next()

    @property
    def room(self) -> int:
        """How many more messages may be handled now."""
        return 0 if self.is_held or self._plan.is_stopped() else self._most - len(self._tasks)

    def _begin_one(self, window: Window, item: Item) -> bool:
        """Begin to handle an item; False if no handler gets it."""
        topic = _topic_of(item.record)
        handler = handler_of(self._plan.handlers, topic)
        if item.is_orphan and item.attempt > retries.most_attempts(handler):
            item.attempt -= 1
            error = DeadLetter(f"{item.attempt} attempts, the last one ended with its process")
            self._fail(window, item, handler, topic, error)
            return False
        try:
            is_wanted = handler is None or self._is_wanted(handler, topic, item.record)
            message = _message(topic, item) if is_wanted else None
        except Exception as error:
            # Any producer may write to the topic. If this error were raised, it would end every consumer in turn.
            log.exception("%s is not a message", retries.id_of(item.record))
            self._fail(window, item, handler, topic, DeadLetter(f"the record cannot be read as a message: {error}"))
            self._partitions.look(window)
            return False
        if message is None:
            window.finish(item)
            self._partitions.look(window)
            return False
        task = asyncio.get_running_loop().create_task(self._handle(window, item, handler, message))
        self._tasks[task] = window, message.id
        if handler is not None and handler.batch is not None:
            self._in_batches.add(task)
        task.add_done_callback(self._put_down)
        return True

    def _wait_for_the_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_us = self._partitions.next_due_us
        if due_us is not None and not self.is_held:
            seconds = max(0.001, (due_us - steady_clock()) / 1e6)
            self._timer = asyncio.get_running_loop().call_later(seconds, self.begin)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._in_batches.discard(task)
        self.begin()
        if not self._partitions.has_ready(self._lot.low):
            self.moved.set()

    def _is_wanted(self, handler: Handler, topic: str, record: Any) -> bool:
        headers = records.listed(record)
        expires = records.number(headers, records.EXPIRES)
        if expires is not None and expires <= time.time_ns() // 1000:
            return False
        tag = records.header(headers, records.TAG)
        if handler.tags and tag not in handler.tags:
            return False
        condition = self._filters.get(handler.topic)
        return condition is None or condition.is_true_for(_own_headers(record), _key(record), tag, topic)

    async def _handle(self, window: Window, item: Item, handler: Handler | None, message: ReceivedMessage) -> None:
        if handler is not None and handler.batch is not None:
            await self._handle_now(window, item, handler, message)
            return
        async with self._singly:
            await self._handle_now(window, item, handler, message)

    async def _handle_now(self, window: Window, item: Item, handler: Handler | None, message: ReceivedMessage) -> None:
        if window.is_closed:  # another instance has got the partition since this task was made
            return
        if self._plan.is_stopped():
            window.put_back(item)
            return
        try:
            if handler is None:
                raise InvalidRequest(
                    f"there is no handler here for topic {message.topic!r}; another instance may have it"
                )
            await self._plan.call(handler, message)
        except NotTried:
            if not window.is_closed:
                window.put_back(item)
        except BaseException as error:
            if is_cancelled(error):
                raise
            self._failures.tell(message.topic, message.id, item.attempt, error)
            self._fail(window, item, handler, message.topic, error)
        else:
            window.finish(item)
        self._partitions.look(window)

    def _fail(self, window: Window, item: Item, handler: Handler | None, topic: str, error: BaseException) -> None:
        if window.is_closed:
            return
        if retries.is_last(handler, item.attempt, error):
            self._settling.depart(retries.dead_letter(self._plan.group, window, item, topic, error))
            return
        seconds = retries.wait_of(handler, item.attempt)
        if handler is None or handler.mode == "shared":
            self._settling.depart(retries.retry(self._plan.group, window, item, topic, seconds, error))
        else:
            window.fail(item, retries.due_after(seconds))

    @property
    def under_way(self) -> int:
        """The number of messages with handlers."""
        return len(self._tasks)

    # --- the end ----------------------------------------------------------------------------------------------

    async def finished(self, seconds: float, windows: Iterable[Window] | None = None) -> list[str]:
        """Wait at most `seconds` for running handlers, of these windows or all. Returns the ids of the messages whose
        handlers are still running."""
        chosen = None if windows is None else set(windows)
        tasks = [task for task, (window, _) in self._tasks.items() if chosen is None or window in chosen]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return [self._tasks[task][1] for task in tasks if task in self._tasks and not task.done()]

    def cancel_batches(self, windows: Iterable[Window]) -> None:
        """Cancel messages of these windows that wait for a batch: another instance handles them."""
        chosen = set(windows)
        for task in self._in_batches:
            if self._tasks[task][0] in chosen:
                task.cancel()

    async def cancel(self) -> None:
        """Cancel the tasks of running handlers, and wait for them no longer."""
        self.is_held = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_SECONDS)


def _topic_of(record: Any) -> str:
    """The topic of a record's message: for a record of a retry topic, its header names the original topic."""
    topic: str = record.topic()
    return (records.header(records.listed(record), records.TARGET) or topic) if topic.startswith(RETRY) else topic


def _key(record: Any) -> str | None:
    return record.key().decode("utf-8", "replace") if record.key() is not None else None


def _written_at(record: Any) -> str:
    """When a record was written, by its producer's clock, as RFC 3339; limited to the years 1970 to 9999."""
    seconds = min(max(0, record.timestamp()[1]), LAST_MILLISECOND) / 1000
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _own_headers(record: Any) -> dict[str, str]:
    """The message's own headers; for a dead letter, also the headers that say why it failed."""
    headers = records.listed(record)
    own_headers = records.own_headers(headers)
    return own_headers | records.why_dead(headers) if record.topic().startswith(DEAD_LETTER) else own_headers


def _message(topic: str, item: Item) -> ReceivedMessage:
    record = item.record
    headers = records.listed(record)
    return ReceivedMessage(
        retries.id_of(record),
        topic,
        record.partition(),
        record.offset(),
        record.value() or b"",
        _key(record),
        records.header(headers, records.TAG),
        _own_headers(record),
        item.attempt,
        _written_at(record),
        records.number(headers, REPLAY) or 0,
    )
