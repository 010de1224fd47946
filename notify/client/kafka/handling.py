"""Handling: has records handled in runs, and decides what becomes of each record: done, retried, or a dead letter."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime

from notify.client.handling.failure_log import FailureLog
from notify.client.handling.handlers import Cancelled, Handler, NotTried, handler_of
from notify.client.handling.runs import Run, Times, by_run, ranges_of
from notify.client.kafka import retries
from notify.client.kafka.feed import PollSize
from notify.client.kafka.partitions import Partitions
from notify.client.kafka.plan import Plan
from notify.client.kafka.settling import RETRY_MAX_SECONDS, RETRY_SECONDS, Settling
from notify.client.kafka.window import Item, Window
from notify.errors import DeadLetter
from notify.kafka.groups import DEAD_LETTER, RETRY
from notify.kafka.records import EXPIRES, ID, TAG, TARGET, listed, split, text_of, why_dead
from notify.protocol.filter import Filter
from notify.protocol.limits import digits
from notify.protocol.message import REPLAY, ReceivedMessage, received
from notify.protocol.withdrawal import without_own
from notify.runtime.backoff import Backoff
from notify.runtime.clock import steady_clock
from notify.runtime.program_log import program_log

log = program_log("notify.consumer")

LOOKED_AT = 1000
"""The most records that are looked at before the loop's other tasks get a turn."""
NAMED_IN_LOG = 10
LAST_MILLISECOND = 253_402_300_799_000
"""The last second of the year 9999."""


class PartitionRun(Run):
    """Messages of one partition for the same handler, in their order."""

    __slots__ = ("items", "not_tried", "window")

    def __init__(
        self,
        handling: Handling,
        handler: Handler | None,
        window: Window,
        items: list[Item],
        messages: list[ReceivedMessage],
    ) -> None:
        super().__init__(handling, handler, "", 0, messages)
        self.window = window
        self.items = items
        self.not_tried: list[int] = []
        """The places of noted messages that go back to the window."""


class Handling:
    """Puts ready items into the consumer's hand, and notes in their windows what became of them. Belongs to the event
    loop."""

    def __init__(self, plan: Plan, partitions: Partitions, settling: Settling, poll_size: PollSize) -> None:
        """Raises InvalidRequest for an invalid filter."""
        self._plan = plan
        self._hand = plan.hand
        self._partitions = partitions
        self._settling = settling
        self._poll_size = poll_size
        self._failures = FailureLog()
        self.times = Times()  # no server asks for them
        self._filters = {h.topic: Filter(h.filter) for h in plan.handlers.values() if h.filter}
        self._choosy = {h.topic for h in plan.handlers.values() if h.tags or h.filter}
        """The topics of handlers that do not get every message."""
        self._runs: dict[PartitionRun, None] = {}
        """The runs with messages in hand."""
        self._ended = asyncio.Event()
        """Set when nothing of a run is in hand any more."""
        self._timer: asyncio.TimerHandle | None = None
        self.moved = asyncio.Event()
        """Set when handlers have returned, and so few items are ready that more should be fetched."""
        self.noting = asyncio.Event()
        """Set when there is room for items whose attempts have to be noted first."""
        self.is_held = False
        """Whether no new handler may begin: the group is paused, or the consumer stops."""

    def hold(self, is_held: bool) -> None:
        """Have no new handler begin, or let them begin again. What waits for its handler goes back to its window."""
        self.is_held = is_held
        if is_held:
            self.give_back()

    # --- into the hand ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take ready items in hand: when there is room for many, so that runs are not cut into ever smaller ones, and
        when none waits there."""
        looked_at = 0
        while not self._is_over and looked_at < LOOKED_AT:
            room = self._hand.room(is_near=True)  # grows with the first messages that come for the first time
            taken = self._take(min(room, LOOKED_AT - looked_at))
            if not taken:
                break
            looked_at += taken
        if looked_at == LOOKED_AT:
            asyncio.get_running_loop().call_soon(self.begin)
        if self._partitions.has_to_note and self.room:
            self.noting.set()
        self._wait_for_the_next()

    def _take(self, most: int) -> int:
        """Take ready items in hand, up to a number; returns how many were looked at."""
        looked_at = 0
        runs: list[PartitionRun] = []
        for window, items in self._partitions.take(most):
            looked_at += len(items)
            runs += self._runs_of(window, items)
        if runs:
            self._runs.update(dict.fromkeys(runs))
            self._hand.put(runs)
        return looked_at

    @property
    def _is_over(self) -> bool:
        return self.is_held or self._plan.is_stopped()

    @property
    def room(self) -> int:
        """How many attempts may be noted now."""
        return 0 if self._is_over else max(0, self._plan.at_once - self._hand.count)

    @property
    def is_low(self) -> bool:
        """Whether so few items wait behind those that handlers are busy with that more should be fetched."""
        half = self._poll_size.half
        if self._hand.count < half and self._partitions.count < half:
            return True
        waiting = max(0, self._hand.count - max(self._hand.under_way, self._plan.concurrency))
        return waiting < self._poll_size.low and not self._partitions.has_ready(self._poll_size.low - waiting)

    def _runs_of(self, window: Window, items: list[Item]) -> list[PartitionRun]:
        """The runs of taken items. The others are finished in their window, or leave as dead letters."""
        found: list[tuple[Handler | None, list[Item], list[ReceivedMessage]]] = []
        source = items[0].record.topic()
        is_retry, is_letter = source.startswith(RETRY), source.startswith(DEAD_LETTER)
        topic, handler = source, handler_of(self._plan.handlers, source)
        count = 0
        for item in items:
            fields, own_headers = split(item.record)
            if is_letter:
                own_headers = (own_headers or {}) | why_dead(listed(item.record))
            if is_retry:
                target = text_of(fields.get(TARGET, "")) or source
                if target != topic:
                    topic, handler = target, handler_of(self._plan.handlers, target)
            message = self._message(window, item, topic, handler, fields, own_headers)
            if message is None:
                continue
            if not found or found[-1][0] is not handler:
                found.append((handler, [], []))
            _, taken, messages = found[-1]
            taken.append(item)
            messages.append(message)
            count += 1
        if count < len(items):
            self._partitions.look(window)
        return [PartitionRun(self, handler, window, taken, messages) for handler, taken, messages in found]

    def _message(
        self, window: Window, item: Item, topic: str, handler: Handler | None, fields: dict[str, str | bytes],
        own_headers: dict[str, str] | None,
    ) -> ReceivedMessage | None:  # fmt: skip
        """An item as a message for its handler; None if it is finished, or leaves as a dead letter. `fields`: all
        headers of the record."""
        if item.is_orphan and item.attempt > retries.most_attempts(handler):
            item.attempt -= 1
            error = DeadLetter(f"{item.attempt} attempts, the last one ended with its process")
            self._fail(window, item, handler, topic, error)
            return None
        try:
            record, key = item.record, item.key
            message_id, tag, replay = fields.get(ID), fields.get(TAG), fields.get(REPLAY)
            message = received(
                text_of(message_id) if message_id else retries.id_of(record),
                topic,
                record.partition(),
                item.offset,
                record.value() or b"",
                None if key is None else key.decode("utf-8", "replace"),
                None if tag is None else text_of(tag),
                without_own(own_headers) if own_headers else {},
                item.attempt,
                _instant(record.timestamp()[1]),
                0 if replay is None else digits(text_of(replay)) or 0,
            )
            if handler is None:
                return message
            is_past = EXPIRES in fields and _is_past(fields[EXPIRES])
            if not is_past and (handler.topic not in self._choosy or self._is_wanted(handler, message)):
                return message
        except Exception as error:
            # Any producer may write to the topic. If this error were raised, it would end every consumer in turn.
            log.exception("%s is not a message", retries.id_of(item.record))
            self._fail(window, item, handler, topic, DeadLetter(f"the record cannot be read as a message: {error}"))
        else:
            window.finish(item)
        return None

    def _is_wanted(self, handler: Handler, message: ReceivedMessage) -> bool:
        if handler.tags and message.tag not in handler.tags:
            return False
        condition = self._filters.get(handler.topic)
        return condition is None or condition.is_true_for(message.headers, message.key, message.tag, message.topic)

    def _wait_for_the_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_us = self._partitions.next_due_us
        if due_us is not None and not self.is_held:
            seconds = max(0.001, (due_us - steady_clock()) / 1e6)
            self._timer = asyncio.get_running_loop().call_later(seconds, self.begin)

    # --- what became of it ------------------------------------------------------------------------------------

    def noted(self, run: Run, place: int, error: BaseException) -> None:
        """The handler of a message has raised an error: it is retried, a dead letter, or goes back to its window."""
        assert isinstance(run, PartitionRun)
        if isinstance(error, NotTried):
            run.not_tried.append(place)
            return
        if not isinstance(error, Cancelled):  # the message of a cancelled consumer comes again
            message = run.message(place)
            self._failures.record(message.topic, message.id, message.attempt, error)
            self._fail(run.window, run.items[place], run.handler, message.topic, error)
        self._hand.settled(run, range(place, place + 1))

    def settle_noted(self, run: Run, returned: Sequence[range]) -> None:
        """Finish the messages of a run whose handlers have returned, and put back those that no handler got."""
        assert isinstance(run, PartitionRun)
        if returned and not run.window.is_closed:  # otherwise another instance has got the partition
            run.window.finish_all([item for places in returned for item in run.items[places.start : places.stop]])
        for places in returned:
            self._hand.settled(run, places)
        not_tried, run.not_tried = run.not_tried, []
        self._put_back(run, not_tried)
        self.begin()
        if self.is_low:
            self.moved.set()

    def _put_back(self, run: PartitionRun, places: list[int]) -> None:
        if not run.window.is_closed:
            for place in sorted(places, reverse=True):
                run.window.put_back(run.items[place])
        for together in ranges_of(places):
            self._hand.settled(run, together)
        self._partitions.look(run.window)
        if not run.unsettled:
            self._runs.pop(run, None)
            self._ended.set()

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
        """The number of messages in hand."""
        return sum([run.unsettled for run in self._runs])

    # --- the end ----------------------------------------------------------------------------------------------

    def give_back(self, windows: Iterable[Window] | None = None) -> None:
        """Return what waits for its handler to its window, of these windows or all."""
        for run, places in by_run(self._hand.let_go(self, frozenset(self._of(windows)))):
            assert isinstance(run, PartitionRun)
            self._put_back(run, places)

    def _of(self, windows: Iterable[Window] | None) -> Collection[PartitionRun]:
        """The runs of these windows, or all."""
        if windows is None:
            return self._runs
        chosen = set(windows)
        return [run for run in self._runs if run.window in chosen]

    async def finished(self, seconds: float, windows: Iterable[Window] | None = None) -> list[str]:
        """Wait at most `seconds` for running handlers, of these windows or all. Returns the ids of the messages whose
        handlers are still running."""
        chosen = None if windows is None else set(windows)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._of(chosen):
                    self._ended.clear()
                    await self._ended.wait()
        return [message.id for run in self._of(chosen) for message in run.messages if message is not None]

    async def cancel(self) -> None:
        """Cancel running handlers, and wait for them no longer."""
        self.hold(True)
        if self._timer is not None:
            self._timer.cancel()
        await self._plan.cancel(self)


class AttemptNotes:
    """Notes attempts in Kafka before they begin, in partitions whose last consumer died or was cut off. Belongs to the
    event loop.

    A message that kills its process never gets a result. Without a note each attempt would count as its first, and it
    would kill every consumer. One commit notes the attempts of many messages; partitions whose last consumer ended
    properly need no notes. An orphan, whose last attempt ended with its process, is tried alone, so that no other
    message is suspected.
    """

    def __init__(self, partitions: Partitions, settling: Settling, handling: Handling) -> None:
        self._partitions = partitions
        self._settling = settling
        self._handling = handling

    async def run(self) -> None:
        """Note attempts until cancelled. Raises errors that a retry cannot mend."""
        while True:
            await self._handling.noting.wait()
            self._handling.noting.clear()
            noted = self._note()
            if noted:
                await self._commit()
                for window, items in noted:
                    window.noted(items)
                    self._partitions.look(window)
                self._handling.begin()

    async def _commit(self) -> None:
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            if await self._settling.settle():
                return
            await asyncio.sleep(backoff.next())

    def _note(self) -> list[tuple[Window, list[Item]]]:
        """The items whose attempts are to be noted: as many as can begin now, but an orphan alone. If the process dies,
        all noted messages have used up an attempt."""
        windows = [window for _, window in self._partitions.items()]
        room = self._handling.room
        orphaned = [window for window in windows if window.has_orphan_to_note]
        if any(window.tries_orphan for window in windows) or (orphaned and any(window.tries for window in windows)):
            room = 0
        elif orphaned:
            windows, room = orphaned[:1], min(room, 1)
        noted: list[tuple[Window, list[Item]]] = []
        for window in windows:
            items = window.note(room)
            room -= len(items)
            noted += [(window, items)] if items else []
        self._partitions.has_to_note = any(window.has_to_note for _, window in self._partitions.items())
        return noted


def _is_past(expires: str | bytes) -> bool:
    """Whether a message with this header `notify-expires` has expired."""
    expires_us = digits(text_of(expires))
    return expires_us is not None and expires_us <= time.time_ns() // 1000


@functools.lru_cache(maxsize=16)
def _instant(milliseconds: int) -> str:
    """When a record was written, by its producer's clock, as RFC 3339; limited to the years 1970 to 9999."""
    seconds = min(max(0, milliseconds), LAST_MILLISECOND) / 1000
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
