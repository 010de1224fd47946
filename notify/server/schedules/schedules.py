"""Sends the messages of schedules when they are due, and declares schedules."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from notify.errors import InvalidRequest, NotFound
from notify.protocol.limits import check_headers, check_name
from notify.protocol.wire import Item, JsonSchedule, PackedMessages, PackedPublished, PackedSchedule, instant
from notify.runtime import faults
from notify.runtime.threads import in_thread
from notify.server.access.principal import Principal
from notify.server.core.admission import new_messages
from notify.server.core.core import Core
from notify.server.schedules.place import Place
from notify.server.schedules.records import ScheduleRecords
from notify.server.schedules.schedule import (
    MISSED_US,
    Declaration,
    Due,
    Mark,
    Schedule,
    declaration_of,
    encoded,
    headers_of,
    timetable_of,
)
from notify.server.tasks import ended
from notify.storage import crash_point

if TYPE_CHECKING:
    from notify.server.schedules.timetable import Timetable

log = structlog.get_logger("notify.server")

MOST_SCHEDULES = 10_000
MOST_BYTES = 64 << 20
"""The most bytes of all declarations: servers hold them in memory."""
MOST_TOGETHER, MOST_BATCH_BYTES = 200, 4 << 20
"""The most schedules and messages, and bytes of messages, that are sent with one write to the storage."""
LOOK_SECONDS, SOON_SECONDS = 1.0, 0.25
"""How long a server with schedules sleeps at most: its clock may be set; and while another one is to send first."""
FAILED_SECONDS = 2.0
"""How long nothing is sent after a failure, as where the registry's database does not answer."""
TAKE_OVER_US = 3_000_000
"""How late an instant is when any server sends it."""
FAR_BEHIND_US = 600_000_000
"""From here on a thread finds the instants that are due, which takes up to 30 ms."""
RETRY_US, REFUSED_US = 1_000_000, 10_000_000
"""When a message is tried again that could not be stored at the moment, and one that was refused."""
ALARMS = 20
"""The most schedules with an alarm of their own."""
MISSED_ALARM_US = 600_000_000
"""How long the alarm of a missed instant lasts."""


class Change(NamedTuple):
    """The effect of a declaration: none if `before` has the same declaration."""

    before: Schedule | None
    declaration: Declaration
    timetable: Timetable

    @property
    def is_change(self) -> bool:
        return self.before is None or self.before.declaration != self.declaration


class Schedules:
    """The schedules that this server reads. A server without any has no timer. Call its methods on the event loop."""

    def __init__(
        self,
        core: Core,
        records: ScheduleRecords,
        place: Place,
        record: Callable[[int, str, str, str, str, Any], int] | None = None,
    ) -> None:
        """`record` is called in a thread with each change that code declares: when, who, what, target, reason, result;
        see Records.record."""
        self._record_action = record
        self._core = core
        self._clock = core.clock
        self._records = records
        self.place = place
        self._all: dict[str, Schedule] = {}
        self._own: list[Schedule] = []
        """Those whose messages this server may send."""
        self._away_us: dict[str, int] = {}
        """Since when no living server has a log to which schedules belong."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._one_look = asyncio.Lock()
        self._has_started = False

    # --- what there is ----------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read the schedules again: one was declared, changed or deleted."""
        async with self._one_look:  # an older list must not replace a newer one
            self._hold({row["name"]: self._known(row) for row in await in_thread(self._records.all)})

    async def _look_up(self, name: str) -> Schedule | None:
        """The schedule of this name, as it is stored now."""
        async with self._one_look:
            row = await in_thread(self._records.one, name)
            if row is not None:
                schedule = self._known(row)
                if schedule is not self._all.get(name):
                    self._hold(self._all | {name: schedule})
            elif name in self._all:
                self._hold({known: schedule for known, schedule in self._all.items() if known != name})
            return self._all.get(name)

    def _known(self, row: Mapping[str, Any]) -> Schedule:
        """The schedule of a row. To read its declaration takes far longer than to compare when it was changed."""
        known = self._all.get(row["name"])
        if known is None or not known.is_of(row):
            return Schedule.of(row)
        known.move_to(row)
        return known

    def _hold(self, schedules: dict[str, Schedule]) -> None:
        self._all = schedules
        self._own = [schedule for schedule in schedules.values() if self.place.has(schedule)]
        self._begin()

    def start(self) -> None:
        """Begin to send messages. Before this, schedules are only read."""
        self._has_started = True
        self._begin()

    def _begin(self) -> None:
        if self._own and self._has_started and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._changed.set()

    def all(self) -> Sequence[Schedule]:
        """All schedules, by name."""
        return sorted(self._all.values(), key=lambda schedule: schedule.name)

    def own(self) -> Sequence[Schedule]:
        """The schedules whose messages this server may send."""
        return self._own

    async def one(self, name: str) -> Schedule:
        """The schedule of this name, as it is stored now. Raises NotFound."""
        schedule = await self._look_up(name)
        if schedule is None:
            raise NotFound(f"there is no schedule {name[:100]!r}")
        return schedule

    # --- declarations -----------------------------------------------------------------------------------------

    async def wanted(self, name: str, request: JsonSchedule | PackedSchedule, sender: Principal | None) -> Change:
        """Check a declaration, and compare it with what is stored.

        `sender`: its right to publish is checked, also for the topic of a schedule that would be replaced; None: no
        right is checked. Raises InvalidRequest, TooLarge, Forbidden, WrongRole, Unavailable, UnknownTopic.
        """
        check_name("schedule", name)
        check_name("topic", request.message.topic)
        if sender is not None:
            sender.check("publish", request.message.topic)
        self.place.check_declares()
        topics = self._core.topics
        (new,) = new_messages((request.message,), self._clock(), lambda topic: False, topics.check_use)
        assert new.content is not None
        check_headers((new.content.headers or {}) | headers_of(name, self._clock()))
        declaration = declaration_of(request, new.content)
        timetable = timetable_of(declaration)
        now_us = self._clock()
        if not timetable.next(now_us, 1):
            raise InvalidRequest("this schedule is never due: no such day comes within 50 years", "invalid_schedule")
        before = await self._look_up(name)
        if before is not None:
            if sender is not None:
                sender.check("publish", before.declaration.message.topic, called="the schedule's present topic")
        elif len(self._all) >= MOST_SCHEDULES:
            raise InvalidRequest(f"there are {MOST_SCHEDULES} schedules already: delete one first", "out_of_bounds")
        others = sum(schedule.size for schedule in self._all.values() if schedule is not before)
        if others + len(encoded(declaration)) > MOST_BYTES:
            raise InvalidRequest(f"all schedules have at most {MOST_BYTES >> 20} MiB together", "out_of_bounds")
        return Change(before, declaration, timetable)

    async def declare(self, name: str, change: Change, who: str, reason: str = "") -> Schedule:
        """Carry out a change of `wanted`; the schedule as it is stored then. With a `reason` the change is recorded
        among the actions. Raises Conflict."""
        if change.is_change:
            now_us, text, before = self._clock(), encoded(change.declaration), change.before
            if before is None:
                await in_thread(self._records.add, name, self.place.of_new, text, now_us, who)
            else:
                done_us = None if before.declaration.when == change.declaration.when else now_us  # others begin now
                await in_thread(self._records.change, name, before.changed_us, text, now_us, who, done_us)
            log.info("schedule_declared", schedule=name, who=who)
            result = {"name": name, "next": self.next_of(change.timetable, 3)}
            await self._note("schedule.put", name, who, reason, result)
        return await self.one(name)

    def next_of(self, timetable: Timetable, count: int) -> list[str]:
        """The next instants of a timetable."""
        return [instant(at_us) for at_us in timetable.next(self._clock(), count)]

    async def pause(self, name: str, paused: bool, who: str) -> Schedule:
        """Pause or resume a schedule: what was due while it was paused is left out. Raises NotFound."""
        if not await in_thread(self._records.pause, name, paused, self._clock(), who):
            raise NotFound(f"there is no schedule {name[:100]!r}")
        return await self.one(name)

    async def delete(self, name: str, who: str = "", reason: str = "") -> bool:
        """Delete a schedule. Returns whether there was one. With a `reason` it is recorded among the actions."""
        was_there = await in_thread(self._records.delete, name)
        if was_there:
            await self._note("schedule.delete", name, who, reason, {"deleted": name})
        await self._look_up(name)
        return was_there

    async def _note(self, what: str, name: str, who: str, reason: str, result: Any) -> None:
        if reason and self._record_action is not None:
            await in_thread(self._record_action, self._clock(), who, what, name, reason, result)

    # --- sending ----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        await ended(self._task)

    async def _run(self) -> None:
        while True:
            seconds = self._sleep_seconds()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.send_due()
            except Exception as error:
                faults.note("schedules_failed", error)
                await asyncio.sleep(FAILED_SECONDS)

    def _sleep_seconds(self) -> float | None:
        """How long to sleep; None: until something is declared."""
        soonest_us = min((at_us for s in self._own if (at_us := _wakes_us(s))), default=0)
        if not soonest_us:
            return None
        seconds = (soonest_us - self._clock()) / 1e6
        if seconds > 0:
            return min(LOOK_SECONDS, seconds)
        return 0.0 if self._due() else SOON_SECONDS

    async def send_due(self) -> None:
        """Send the messages of all instants that are due."""
        async with self._one_at_a_time:
            while due := self._due():
                if self.place.shares_storage:
                    await self._look_at(due)
                    due = [schedule for schedule in due if 0 < _wakes_us(schedule) <= self._clock()]
                if due:
                    await self._send(due)

    def _due(self) -> list[Schedule]:
        """Schedules whose messages this server has to send now, the longest due first."""
        now_us = self._clock()
        due = sorted([s for s in self._own if 0 < _wakes_us(s) <= now_us], key=lambda s: s.next_us)
        mine = (s for s in due if s.next_us + TAKE_OVER_US <= now_us or self.place.comes_first(s))
        return list(islice(mine, MOST_TOGETHER))

    async def _look_at(self, schedules: Sequence[Schedule]) -> None:
        """Take over how far other servers have come with these schedules."""
        found = await in_thread(self._records.positions, [s.name for s in schedules])
        for s in schedules:
            position = found.get(s.name)
            if position is None or position[0] != s.secret:
                s.next_us = 0  # deleted, or made again: what follows the changes will find it
                continue
            _, done_us, s.sent, s.missed, s.last_instant_us, s.last_sent_us, s.paused = position
            if done_us != s.done_us:
                s.done_us, s.unrecorded = done_us, None
                s.find_next()

    async def _send(self, due: Sequence[Schedule]) -> None:
        """Send at most one batch of messages, and record how far their schedules are."""
        now_us = self._clock()
        plans: list[tuple[Schedule, Due, list[PackedPublished]]] = []
        messages: list[PackedPublished] = []
        size = 0
        for schedule in due:
            is_far_behind = now_us - schedule.next_us > FAR_BEHIND_US
            plan = await in_thread(schedule.due, now_us) if is_far_behind else schedule.due(now_us)
            message_size = len(schedule.declaration.message.body) + 1024
            room = min(MOST_TOGETHER - len(messages), (MOST_BATCH_BYTES - size) // message_size)
            batch = [schedule.message(at_us) for at_us in plan.instants[:room]]
            if plan.instants and not batch:
                break
            plans.append((schedule, plan, batch))
            messages += batch
            size += message_size * len(batch)
        items: dict[str | None, Item] = {}
        if messages:
            answered = await self._core.transactions.publish(PackedMessages(messages=messages), anywhere=True)
            items = {message.id: item for message, item in zip(messages, answered, strict=True)}
            crash_point.reached("schedule.before_mark")
        marks = {s.name: mark for s, plan, some in plans if (mark := self._mark(s, plan, some, items)) is not None}
        await self._record(marks, now_us)

    def _mark(
        self, schedule: Schedule, plan: Due, sent: Sequence[PackedPublished], items: Mapping[str | None, Item]
    ) -> Mark | None:
        """The step of a schedule after its messages were answered, with an earlier one that could not be recorded;
        None: it is where it was."""
        now_us = self._clock()
        refused = None
        count = 0
        for message in sent:
            item = items[message.id]
            # An id that is in use is that of an earlier message for this instant: the schedule was changed since.
            if item.status not in (200, 201) and item.code != "id_in_use":
                refused = item
                break
            count += 1
        to_us = plan.until_us if count == len(plan.instants) else plan.instants[count - 1]
        is_stuck = (to_us <= plan.from_us and schedule.unrecorded is None) or (count == 0 and bool(plan.instants))
        schedule.fault, schedule.retry_us = "", 0
        if refused is not None or is_stuck:
            is_for_now = refused is not None and refused.status in (429, 500, 503, 507)
            schedule.retry_us = now_us + (RETRY_US if is_for_now else REFUSED_US)
            why = "it has no instants" if refused is None else refused.detail or refused.code
            schedule.fault = f"its message is refused: {why}"
        before = schedule.unrecorded
        if is_stuck or (before is not None and not plan.instants):
            return before
        last_us = plan.instants[count - 1] if count else 0
        mark = Mark(schedule.name, schedule.secret, plan.from_us, to_us, count, plan.missed, last_us, now_us)
        return mark if before is None else before.and_then(mark)

    async def _record(self, marks: Mapping[str, Mark], now_us: int) -> None:
        try:
            recorded = await in_thread(self._records.mark, list(marks.values()))
        except faults.DATABASE_AWAY as error:
            faults.note("schedules_not_recorded", error)  # after a restart the ids make sending them again harmless
            for name, mark in marks.items():
                schedule = self._all.get(name)
                if schedule is not None and schedule.secret == mark.secret and schedule.done_us == mark.from_us:
                    schedule.unrecorded, schedule.retry_us = mark, now_us + RETRY_US
            return
        for name, mark in marks.items():
            schedule = self._all.get(name)
            if name in recorded and schedule is not None and schedule.secret == mark.secret:
                schedule.done_us, schedule.unrecorded = mark.to_us, None
                schedule.sent += mark.sent
                schedule.missed += mark.missed
                if mark.sent:
                    schedule.last_instant_us, schedule.last_sent_us = mark.last_instant_us, mark.sent_us
                if mark.missed:
                    schedule.missed_us = now_us
                    log.warning("schedule_missed", schedule=name, instants=mark.missed)
                schedule.find_next()
            if name in recorded:
                self._core.metrics.scheduled += mark.sent
                self._core.metrics.schedule_missed += mark.missed
        if len(recorded) < len(marks):
            await self.follow()

    # --- for people -------------------------------------------------------------------------------------------

    def alarms(self) -> list[tuple[str, str]]:
        """(schedule, sentence) of what is late, missed or cannot be sent; with "" for further schedules."""
        now_us = self._clock()
        found = [(s.name, sentence) for s in self._own if (sentence := _complaint(s, now_us))]
        found += self._without_server(now_us)
        if len(found) > ALARMS:
            return [
                *found[: ALARMS - 1],
                ("", f"{len(found) - ALARMS + 1:,} more schedules are late or have missed messages"),
            ]
        return found

    def _without_server(self, now_us: int) -> list[tuple[str, str]]:
        """Schedules whose server is unreachable for so long that a message may be missed."""
        away = [s for s in self._all.values() if not s.paused and s.next_us and self.place.is_away(s)]
        self._away_us = {s.place: self._away_us.get(s.place, now_us) for s in away}
        return [
            (
                s.name,
                f"Schedule {s.name} sends nothing: no server has the log {s.place!r}. Start that server, or delete the "
                "schedule and declare it again",
            )
            for s in away
            if now_us - self._away_us[s.place] > MISSED_US
        ]


def _wakes_us(schedule: Schedule) -> int:
    """When a message of the schedule is to be sent or tried again; 0: never."""
    if schedule.paused or not schedule.next_us:
        return 0
    return max(schedule.next_us, schedule.retry_us)


def _complaint(s: Schedule, now_us: int) -> str:
    state, why = s.state(now_us), f": {s.fault}" if s.fault else ""
    if state == "broken":
        return f"Schedule {s.name} sends nothing{why}"
    if state == "late":
        return f"Schedule {s.name} is late: its message for {instant(s.next_us)} is not sent{why}"
    if state != "paused" and s.done_us > now_us + MISSED_US:
        return (
            f"Schedule {s.name} sends nothing until {instant(s.done_us)}: a clock was ahead when it last sent. Pause "
            "and resume it to continue from now"
        )
    if s.missed_us and now_us - s.missed_us < MISSED_ALARM_US:
        return f"Schedule {s.name} has left out instants that it could not send in time ({s.missed:,} in all)"
    return ""
