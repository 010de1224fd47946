"""Hands checks to producers that poll for them: to the half's group and source, and to its instance if that polls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from notify.check.schedule import CheckSchedule
from notify.protocol import ids
from notify.protocol.limits import LIMITS, check_between, check_name, check_text
from notify.protocol.wire import Payload, Poll
from notify.runtime import tracing
from notify.runtime.clock import Clock
from notify.server.core.check_log import ASKED, CheckLog
from notify.server.metrics import Metrics
from notify.storage.checks import Due
from notify.storage.transactions import TransactionStore

ONLINE_US = 5_000_000
"""A producer polls again as soon as its poll is answered: a group without a poll for this long is offline."""
MOST_GROUPS = 10_000
"""The most groups whose last poll is remembered."""

READ_AT_ONCE = 16
"""Checks whose halves are read at a time. A half may have 8 MiB, which is as much as a reply may have."""
UNMATCHED_RETRY_US = 1_000_000
"""After this time a due check that no waiting poller could answer is tried again; it used up no attempt."""


class _Poller:
    __slots__ = ("answer", "checks", "instance", "max", "sources", "topics")

    def __init__(self, poll: Poll, answer: asyncio.Future[list[Due]]) -> None:
        self.instance = poll.instance
        self.sources = frozenset(poll.sources) if poll.sources else None
        self.topics = frozenset(poll.topics) if poll.topics else None
        self.max = poll.max
        self.checks: list[Due] = []
        self.answer = answer

    def fits(self, due: Due) -> bool:
        return (
            len(self.checks) < self.max
            and (self.sources is None or due.source in self.sources)
            and (self.topics is None or self.topics.issuperset(due.topics))
        )


class Checks:
    """Long polls for checks, by producer group."""

    def __init__(
        self,
        store: TransactionStore,
        clock: Clock,
        schedule: CheckSchedule,
        shard: str,
        metrics: Metrics,
        log: CheckLog,
        with_spans: bool = False,
    ) -> None:
        """`log` records which instance was asked; `with_spans`: add spans to the traces that messages carry."""
        self._store = store
        self._clock = clock
        self.schedule = schedule
        self._shard = shard
        self._metrics = metrics
        self._pollers: dict[str, list[_Poller]] = {}
        """The polls that wait, by producer group; no group without one."""
        self._polled_us: dict[str, int] = {}
        """When a group polled last, for ONLINE_US."""
        self._forgot_us = clock()
        self.log = log
        self._with_spans = with_spans

    async def poll(self, poll: Poll) -> list[dict[str, Any]]:
        """The due checks for a producer; waits up to `wait` seconds for the first."""
        check_name("producer_group", poll.producer_group)
        check_between("wait", poll.wait, 0, LIMITS.wait_seconds)
        check_between("max", poll.max, 1, LIMITS.max_messages)
        _check_filters(poll)
        self._note_poll(poll.producer_group)
        loop = asyncio.get_running_loop()
        poller = _Poller(poll, loop.create_future())
        waiting = self._pollers.setdefault(poll.producer_group, [])
        waiting.append(poller)
        try:
            await self.hand_out(poll.producer_group)
            if poll.wait > 0 and not poller.answer.done():
                try:
                    await asyncio.wait_for(asyncio.shield(poller.answer), poll.wait)
                except TimeoutError:
                    pass  # the answer is an empty list
        finally:
            if poller in waiting:
                waiting.remove(poller)
            if not waiting and self._pollers.get(poll.producer_group) is waiting:
                del self._pollers[poll.producer_group]
        now_us = self._note_poll(poll.producer_group)
        questions = []
        for due, half in await self._halves(poller.checks):
            # A half without messages was decided since its check was claimed, or its payloads are unreadable.
            if half or await self._store.checking(due.id, due.shard or None) is not None:
                questions.append(self._question(due, half))
                self._metrics.checks_sent += 1
                traces = [tracing.trace_id(p.headers) for p in half[:1]] if self._with_spans else []
                self.log.add(due.id, now_us, ASKED, poller.instance, trace_id="".join(traces))
        if self._with_spans:
            for question in questions:
                for p in question["messages"]:
                    tracing.record("ask", p.topic, p.headers, now_us, now_us, **{"notify.attempt": question["attempt"]})
        return questions

    async def _halves(self, checks: Sequence[Due]) -> list[tuple[Due, Sequence[Payload]]]:
        """Checks with their halves, as many as fit into a reply, at least one. The rest is released, and due again."""
        halves: list[tuple[Due, Sequence[Payload]]] = []
        size = 0
        for first in range(0, len(checks), READ_AT_ONCE):
            chunk = checks[first : first + READ_AT_ONCE]
            for due, half in zip(chunk, await self._store.half_contents(chunk), strict=True):
                size += sum(map(_size, half))
                if halves and size > LIMITS.reply_bytes:
                    await self._store.release_checks(checks[len(halves) :], self._clock())
                    return halves
                halves.append((due, half))
        return halves

    async def hand_out(self, group: str) -> None:
        """Give the group's due checks to its waiting pollers."""
        waiting = self._pollers.get(group)
        if not waiting:
            return
        now_us = self._clock()
        room = sum(p.max for p in waiting)
        answer_us = round(self.schedule.answer_within * 1_000_000)
        unmatched: list[Due] = []
        claimed = await self._store.claim_checks(group, now_us, min(room, LIMITS.items), answer_us)
        waiting = self._pollers.get(group, [])  # others may wait by now
        for due in claimed:
            chosen = next((p for p in waiting if p.instance == due.instance and p.fits(due)), None)
            chosen = chosen or next((p for p in waiting if p.fits(due)), None)
            if chosen is None:
                unmatched.append(due)
            else:
                chosen.checks.append(due)
        for poller in [p for p in waiting if p.checks]:
            waiting.remove(poller)
            if not poller.answer.done():
                poller.answer.set_result(poller.checks)
        if unmatched:  # last: whether the storage takes this or not, the pollers have their checks
            await self._store.release_checks(unmatched, now_us + UNMATCHED_RETRY_US)

    def _note_poll(self, group: str) -> int:
        """Note that a group polls now, and return the time; beyond MOST_GROUPS the oldest poll is forgotten."""
        now_us = self._clock()
        self._polled_us.pop(group, None)
        if len(self._polled_us) >= MOST_GROUPS:
            del self._polled_us[next(iter(self._polled_us))]
        self._polled_us[group] = now_us
        return now_us

    def is_online(self, group: str) -> bool:
        """Whether a producer of the group is polling for checks, or did within ONLINE_US."""
        polled_us = self._polled_us.get(group)
        return group in self._pollers or (polled_us is not None and self._clock() - polled_us < ONLINE_US)

    def next_event_us(self) -> int | None:
        """When the next check of a group with a waiting poller is due; None if no check waits."""
        times = [self._store.next_check_us(group) for group in self._pollers]
        return min((t for t in times if t is not None), default=None)

    async def tick(self) -> None:
        """Hand out the due checks of every group that polls, and forget groups that have not polled for ONLINE_US."""
        for group in list(self._pollers):
            await self.hand_out(group)
        now_us = self._clock()
        if now_us - self._forgot_us >= ONLINE_US:
            self._forgot_us = now_us
            self._polled_us = {group: at_us for group, at_us in self._polled_us.items() if now_us - at_us < ONLINE_US}

    def _question(self, due: Due, messages: Sequence[Payload]) -> dict[str, Any]:
        return {
            "token": str(due.token),
            "shard": due.shard or self._shard,
            "id": ids.to_text(due.id),
            "source": due.source,
            "attempt": due.attempts + 1,
            "messages": messages,
        }


def _check_filters(poll: Poll) -> None:
    """Raises InvalidRequest for more topics or sources, or longer names, than a poll may hold while it waits."""
    check_text("instance", poll.instance)
    for kind, names in (("topics", poll.topics or ()), ("sources", poll.sources or ())):
        check_between(f"the number of {kind}", len(names), 0, LIMITS.topics)
    for topic in poll.topics or ():
        check_name("topic", topic)
    for source in poll.sources or ():
        check_text("a source", source)


def _size(message: Payload) -> int:
    """An estimate of a message's bytes in a reply."""
    headers = message.headers or {}
    return len(message.body) + sum([len(name) + len(value) for name, value in headers.items()]) + 256
