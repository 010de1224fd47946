"""Alarms: a server looks for conditions that need an operator. It logs and posts each alarm it raises or clears."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import structlog

from notify.admin_api.words import duration, percent
from notify.errors import NotifyError, Unavailable, WrongRole
from notify.protocol.limits import OLD_SLOT_TRANSACTIONS
from notify.protocol.wire import encode_json, instant
from notify.runtime import faults
from notify.runtime.threads import in_thread
from notify.server import webhooks
from notify.server.access.credential import Credential, ending
from notify.server.core.core import Core
from notify.server.core.pushes import Pushes
from notify.server.data_directory import room_of
from notify.server.schedules.schedules import Schedules
from notify.server.shipping import Shipping
from notify.server.tasks import ended, repeated
from notify.server.watch.alarm import CRITICAL, Alarm
from notify.server.watch.group_state import GroupState, Watched
from notify.server.watch.silences import Silences
from notify.storage.capabilities import Complaining

log = structlog.get_logger("notify.server")

GROWTH_SAMPLES = 10
"""A lag grows if it has risen between all of this many samples, taken over `alarm_lag_growing_seconds`."""
SMALLEST_LAG = 100
LEFT_SECONDS = 60.0
"""From this age on, what a producer has left behind is an alarm."""
RESTARTED_US = 600_000_000
"""How long the alarm of a restarted worker lasts."""
WAITING = 1000
"""The most notices that wait for the webhook; beyond that the oldest is dropped."""
TRIES = 5


class Alarms:
    """Looks for alarms every `alarm_every_seconds`, and keeps the raised ones."""

    def __init__(
        self,
        core: Core,
        newest_audit: Callable[[], Awaitable[list[dict[str, Any]]]],
        credentials: Callable[[], Awaitable[list[Credential]]],
        watched: Watched,
        silences: Silences,
        shipping: Shipping | None = None,
        pushes: Pushes | None = None,
        restarted_for: str = "",
        schedules: Schedules | None = None,
    ) -> None:
        """`newest_audit` returns the verdict that was published last, if any; `restarted_for`: why this worker was
        started again, or empty."""
        self._restarted_for = restarted_for
        self._began_us = core.clock() if restarted_for else 0
        self._silences = silences
        self._shipping = shipping
        self._pushes = pushes
        self._schedules = schedules
        self._core = core
        self._watched = watched
        self._newest_audit = newest_audit
        self._credentials = credentials
        self.raised: dict[tuple[str, str], Alarm] = {}
        self._posted: set[tuple[str, str]] = set()
        """The raised alarms that were logged and posted: all except the silenced ones."""
        self._seen_us: dict[str, int] = {}
        """When each group that has a lag was first seen with a lag."""
        self._unread_us: dict[tuple[str, str], int] = {}
        """Since when each group and topic has messages for which no consumer asks, although the group has consumers."""
        self._ailing_us: dict[str, int] = {}
        """Since when each group has a consumer that is stuck or slow."""
        self._lags: dict[str, deque[tuple[int, int]]] = {}
        self.waiting: dict[str, int] = {}
        """Counts of the last look: transactions `in_doubt`, `parked` and `refused`, `dead_letters`, `held_keys`. One is
        missing while its source does not answer."""
        self._notices = Notices(core)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        looking = repeated(self.look, lambda: self._core.settings.alarm_every_seconds, "alarms_failed")
        self._tasks = [loop.create_task(looking), loop.create_task(self._notices.post())]

    async def stop(self) -> None:
        await ended(*self._tasks)

    def now(self) -> list[dict[str, Any]]:
        """The raised alarms, critical ones before warnings, then the oldest first; `silence` is null for an alarm that
        is not silenced."""
        now_us = self._core.clock()
        rows = []
        for alarm in sorted(self.raised.values(), key=lambda a: (a.name not in CRITICAL, a.since_us)):
            silence = self._silences.of(alarm.key, now_us)
            rows.append(alarm.shown() | {"silence": None if silence is None else silence.shown()})
        return rows

    def heard(self) -> list[Alarm]:
        """The raised alarms that nobody has silenced."""
        now_us = self._core.clock()
        return [alarm for key, alarm in self.raised.items() if self._silences.of(key, now_us) is None]

    async def look(self) -> None:
        """Look for all alarms; raise new ones, and clear those that are over."""
        now_us = self._core.clock()
        self._core.objectives.sample()
        current = {(name, target): text for name, target, text in await self._current(now_us)}
        for key, text in current.items():
            earlier = self.raised.get(key)
            alarm = Alarm(*key, text, now_us if earlier is None else earlier.since_us)
            self.raised[key] = alarm
            is_silent = self._silences.of(key, now_us) is not None
            # An alarm whose silence ends while it is raised is posted then.
            if not is_silent and key not in self._posted:
                self._posted.add(key)
                self._post("raised", alarm)
        for key in [key for key in self.raised if key not in current]:
            alarm = self.raised.pop(key)
            if key in self._posted:
                self._posted.discard(key)
                self._post("cleared", alarm)

    async def _current(self, now_us: int) -> list[tuple[str, str, str]]:
        core, settings = self._core, self._core.settings
        current: list[tuple[str, str, str]] = []
        in_doubt = await core.store.in_doubt()
        waiting = {"in_doubt": in_doubt.prepared, "parked": in_doubt.parked}
        age = (now_us - in_doubt.oldest_us) / 1e6 if in_doubt.oldest_us else 0.0
        if settings.alarm_doubt_seconds and age > settings.alarm_doubt_seconds:
            group = in_doubt.oldest_group
            text = f"A transaction of producer group {group} has been in doubt for {duration(age)}"
            current.append(("in_doubt", group, text))
        if settings.alarm_parked and in_doubt.parked >= settings.alarm_parked:
            current.append(("parked", "", f"{_are(in_doubt.parked, 'transaction')} parked, waiting for a decision"))
        current += self._left_behind()
        share = (await in_thread(room_of, settings.data_dir)).used_share
        if settings.alarm_disk_share and share > settings.alarm_disk_share:
            current.append(("disk", settings.data_dir, f"The disk of {settings.data_dir} is {share:.0%} full"))
        for audit in await self._newest_audit():
            if audit["verdict"] == "FINDINGS":
                counts = ", ".join(f"{name} {n}" for name, n in audit["counts"].items() if n)
                current.append(("audit", str(audit["id"]), f"The audit of {instant(audit['at_us'])} found {counts}"))
        for c in ending(await self._credentials(), now_us):
            text = f"The credential {c.id} of {c.name} expires at {instant(c.expires_us)[:16]}Z"
            current.append(("credential", c.name, text))
        try:
            refused = [row for row in await self._watched.refused() if row["waiting"]]
            current += [_refused(row) for row in refused]
            groups = await self._watched.states()
            current += self._groups(groups, now_us)
            waiting["refused"] = sum(row["waiting"] for row in refused)
            waiting |= {"dead_letters": sum(g.dead_letters for g in groups), "held_keys": sum(g.held for g in groups)}
            with contextlib.suppress(WrongRole):
                current += self._sources(await self._watched.sources())
        except Unavailable as error:
            current.append(("kafka", "", f"Groups are not watched: {error}"))
        self.waiting = waiting
        current += self._failing_pushes(now_us)
        if self._schedules is not None:
            current += [("schedule", name, sentence) for name, sentence in self._schedules.alarms()]
        with contextlib.suppress(WrongRole):
            current += self._filters()
        if isinstance(core.store, Complaining):
            current += [("damage", "", f"The log is damaged: {complaint}") for complaint in core.store.complaints()[:1]]
        if self._shipping is not None and (reason := self._shipping.alarm(settings.alarm_shipping_seconds)):
            current.append(("shipping", "", reason))
        if self._restarted_for and now_us - self._began_us < RESTARTED_US:
            name, ago = settings.shard, duration((now_us - self._began_us) / 1e6)
            current.append(("worker", name, f"{name} ended and was started again {ago} ago: {self._restarted_for}"))
        if core.retention_failed:
            current.append(("retention", "", f"Retention failed: {core.retention_failed}"))
        return current

    def _left_behind(self) -> Iterator[tuple[str, str, str]]:
        for row in self._core.left_behind.shown():
            if row["seconds"] > LEFT_SECONDS:
                group, number = row["producer_group"], _number(row["transactions"], "transaction")
                text = f"Producer group {group} has left {number} behind in the database of source {row['source']}"
                yield "left_behind", f"{row['source']}/{group}", f"{text}, the oldest {duration(row['seconds'])} ago"

    def _groups(self, groups: Sequence[GroupState], now_us: int) -> Iterator[tuple[str, str, str]]:
        most_us = self._core.settings.alarm_no_consumer_seconds * 1e6
        names = {group.name for group in groups}
        for name in [name for name in self._lags if name not in names]:
            del self._lags[name]
        for by_group in (self._seen_us, self._ailing_us):
            for name in by_group.keys() - names:
                del by_group[name]
        unread = {
            (group.name, topic): group.lags.get(topic, 0)
            for group in groups if most_us and group.has_consumer and not group.is_paused for topic in group.unread
        }  # fmt: skip
        self._unread_us = {key: self._unread_us.get(key, now_us) for key in unread}
        for (name, topic), lag in unread.items():
            if now_us - self._unread_us[(name, topic)] > most_us:
                text = f"No running consumer of group {name} asks for topic {topic}; {_are(lag, 'message')} waiting"
                yield "unread_topic", f"{name}/{topic}", text
        for group in groups:
            name, lag, is_alone = group.name, group.lag, False
            if lag and not group.is_paused and most_us:
                since_us = max(group.seen_us, self._seen_us.setdefault(name, now_us))
                is_alone = not group.has_consumer and now_us - since_us > most_us
                if is_alone:
                    yield "no_consumers", name, f"Group {name} has no running consumer; {_are(lag, 'message')} waiting"
            elif not lag:
                self._seen_us.pop(name, None)
            yield from self._consumers(group, now_us)
            if not group.is_whole:
                yield "kafka", name, f"The lag of group {name} is larger than is shown: partitions have no leader"
            if group.blocked:
                places = ", ".join(group.blocked[:5])
                text = f"Group {name} gets nothing more of partition {places}: a producer's open transaction hides it"
                yield "kafka", f"{name}/{group.blocked[0]}", text
            if self._grows(name, lag, now_us) and not is_alone:
                which = "paused group" if group.is_paused else "group"
                yield "lag_growing", name, f"The lag of {which} {name} keeps growing: {lag:,} messages by now"
            if not group.is_paused and (missed := self._missed(group)):
                yield "objective", name, missed

    def _missed(self, group: GroupState) -> str:
        """A sentence that says how a group misses its objective; empty if it meets it, or has none."""
        objectives, name = self._core.objectives, group.name
        objective = objectives.by_group.get(name)
        if objective is None:
            return ""
        met, within = objectives.met(name), duration(objective.within)
        wanted = f"its objective is {percent(objective.share)}"
        if met.share is not None:
            done = f"{percent(met.share)} of {_number(met.messages, 'message')} within {within} in the last 5 minutes"
            return f"Group {name} acknowledged {done}; {wanted}" if met.share < objective.share else ""
        if group.oldest_seconds is not None and group.oldest_seconds > objective.within:
            age = duration(group.oldest_seconds)
            waits = f"acknowledged nothing in the last 5 minutes, and a message has waited for {age}"
            return f"Group {name} {waits}; {wanted} within {within}"
        return ""

    def _consumers(self, group: GroupState, now_us: int) -> Iterator[tuple[str, str, str]]:
        settings, name = self._core.settings, group.name
        if settings.alarm_dead_letters and group.dead_letters >= settings.alarm_dead_letters:
            letters = _number(group.dead_letters, "unresolved dead letter")
            yield "dead_letters", name, f"Group {name} has {letters}"
        if settings.alarm_held_keys and group.held >= settings.alarm_held_keys:
            age = duration(max(0, now_us - group.held_since_us) / 1e6)
            yield "held_keys", name, f"{_are(group.held, 'key')} held in group {name}, the first for {age}"
        if group.held_up:
            queues = ", ".join(group.held_up[:5])
            yield "held_up", name, f"Group {name} gets nothing more of queue {queues}: too much waits for held keys"
        ailing = {state: group.consumers.get(state, 0) for state in ("stuck", "slow")}
        if not any(ailing.values()):
            self._ailing_us.pop(name, None)
            return
        since_us = self._ailing_us.setdefault(name, now_us)
        if settings.alarm_consumer_seconds and now_us - since_us >= settings.alarm_consumer_seconds * 1e6:
            counts = " and ".join(f"{count:,} {state}" for state, count in ailing.items() if count)
            yield "consumers", name, f"Consumers of group {name} do not keep up: {counts}"

    def _failing_pushes(self, now_us: int) -> Iterator[tuple[str, str, str]]:
        most_us = self._core.settings.alarm_no_consumer_seconds * 1e6
        failing = self._pushes.failing if self._pushes is not None and most_us else {}
        for name, failure in failing.items():
            group = self._core.delivery.groups.get(name)
            if now_us - failure.since_us > most_us and group is not None and group.lag():
                yield "push", name, f"Calls of the webhook of group {name} fail: {failure.reason}"

    def _filters(self) -> Iterator[tuple[str, str, str]]:
        for name, group in self._core.delivery.groups.items():
            for cursor in group.cursors.values():
                if cursor.refused and cursor.queue == 0:
                    text = f"Group {name} gets nothing of topic {cursor.topic}: {cursor.refused}"
                    yield "filter", f"{name}/{cursor.topic}", text

    def _grows(self, group: str, lag: int, now_us: int) -> bool:
        over = self._core.settings.alarm_lag_growing_seconds
        samples = self._lags.setdefault(group, deque(maxlen=GROWTH_SAMPLES))
        if not over:
            return False
        if not samples or now_us - samples[-1][0] >= over * 1e6 / GROWTH_SAMPLES:
            samples.append((now_us, lag))
        lags = [sampled for _, sampled in samples]
        rises = all(after > before for before, after in zip(lags, lags[1:], strict=False))
        return len(lags) == GROWTH_SAMPLES and rises and lag >= SMALLEST_LAG

    def _sources(self, sources: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
        most = self._core.settings.alarm_bridge_seconds
        for row in sources:
            if most and row["silent_seconds"] > most:
                silence = duration(row["silent_seconds"])
                text = f"The bridge or relay of source {row['source']} has written nothing for {silence}"
                yield "bridge", row["source"], text
            kept, left = row.get("retained_bytes"), row.get("retained_left_bytes")  # an older worker has neither
            if kept is not None and left is not None and kept > left:
                text = (
                    f"The database of source {row['source']} keeps {kept >> 20:,} MB of its log for its bridge, and "
                    f"gives the bridge up after {left >> 20:,} MB more"
                )
                yield "retained_log", row["source"], text
            if (row.get("slot_age_transactions") or 0) > OLD_SLOT_TRANSACTIONS:
                text = (
                    f"The database of source {row['source']} keeps catalogue rows for its bridge that are "
                    f"{row['slot_age_transactions']:,} transactions old"
                )
                yield "old_slot", row["source"], text

    def _post(self, what: str, alarm: Alarm) -> None:
        """Log and post that an alarm was `raised` or `cleared`."""
        write = log.error if what == "raised" else log.info
        write(f"alarm_{what}", alarm=alarm.name, target=alarm.target, text=alarm.text)
        self._notices.add({"alarm": what, "at": instant(self._core.clock())} | alarm.shown())


def _refused(row: Mapping[str, Any]) -> tuple[str, str, str]:
    waiting = _number(row["waiting"], "refused transaction")
    return "refused", row["source"], f"Source {row['source']} has {waiting} that no queue takes, waiting for a decision"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def _are(count: int, noun: str) -> str:
    return f"{_number(count, noun)} {'is' if count == 1 else 'are'}"


class Notices:
    """Posts each raised or cleared alarm to the webhook of the setting `alarm_webhook`, in order."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: deque[dict[str, Any]] = deque(maxlen=WAITING)
        self._wake = asyncio.Event()

    def add(self, notice: dict[str, Any]) -> None:
        """Queue a notice, if there is a webhook."""
        if self._core.settings.alarm_webhook:
            self._waiting.append(notice)
            self._wake.set()

    async def post(self) -> None:
        """Post notices one by one until cancelled; a notice that fails TRIES times is dropped and logged."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._post(self._waiting.popleft())

    async def _post(self, notice: dict[str, Any]) -> None:
        for attempt in range(TRIES):
            try:
                settings = self._core.settings
                await webhooks.post(settings.alarm_webhook, encode_json(notice), settings)
                return
            except NotifyError as error:
                log.warning("alarm_not_sent", reason=str(error)[:300], attempt=attempt + 1)
                if not error.retryable:
                    return
                await asyncio.sleep(2.0**attempt)
            except Exception as error:
                faults.note("alarm_not_sent", error)
                return
