"""The polls that wait for messages, by group, in the order in which they are served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from notify.errors import NotifyError
from notify.protocol.wire import Receive
from notify.runtime.clock import Clock
from notify.server.delivery.group import Group
from notify.server.delivery.leases import Handed
from notify.server.delivery.schedule import Schedule
from notify.server.metrics import Metrics

May = Callable[[str], bool]
"""Whether the consumer has the right, at this moment, to consume the topic of this name."""


class Waiter:
    """A poll that waits for messages of a group."""

    __slots__ = ("answer", "in_runs", "instance", "is_repeated", "lease_us", "max", "may", "request_id", "topics")

    def __init__(
        self,
        request: Receive,
        topics: frozenset[str] | None,
        may: May | None,
        request_id: str = "",
        *,
        in_runs: bool = False,
    ) -> None:
        self.request_id = request_id
        """The name that the instance gave this request; "": none."""
        self.is_repeated = False
        """Whether the same request has come again, so that nobody waits for this answer."""
        self.instance = request.instance
        self.in_runs = in_runs
        self.may = may
        self.topics = topics
        self.max = request.max
        self.lease_us = round(request.lease * 1_000_000)
        self.answer: asyncio.Future[list[Handed]]
        """Made when the poll has to wait."""


def _end_empty(answer: asyncio.Future[list[Handed]]) -> None:
    """Answer a poll without messages, unless it is answered already."""
    if not answer.done():
        answer.set_result([])


class Waiters:
    """The polls that wait, by group."""

    def __init__(self, groups: dict[str, Group], schedule: Schedule, clock: Clock, metrics: Metrics) -> None:
        """`groups`: all groups of the server, by name."""
        self._groups = groups
        self._metrics = metrics
        self._schedule = schedule
        self._clock = clock
        self._by_group: dict[str, deque[Waiter]] = {}
        self._by_request: dict[tuple[str, str, str], Waiter] = {}
        """The polls that wait and have a request id, by (group, instance, request id)."""

    def has(self, name: str) -> bool:
        """Whether a poll waits for messages of a group."""
        return bool(self._by_group.get(name))

    async def messages(self, group: Group, waiter: Waiter, seconds: float) -> list[Handed]:
        """Messages for a poll, which waits at most `seconds` for the first."""
        key = (group.name, waiter.instance, waiter.request_id)
        if waiter.request_id and (again := self._again(group, waiter, key)) is not None:
            return again
        handed = self.hand_out(group, waiter)
        if handed or seconds <= 0:
            return handed
        loop = asyncio.get_running_loop()
        waiter.answer = loop.create_future()
        waiting = self._by_group.setdefault(group.name, deque())
        waiting.append(waiter)
        if waiter.request_id:
            self._by_request[key] = waiter
        self._serve_on(group)
        timer = loop.call_later(seconds, _end_empty, waiter.answer)
        try:
            # No `wait_for` here: cancelled just as it is answered, it loses the answer or the cancellation.
            return await waiter.answer
        except asyncio.CancelledError:
            self._give_back(group, waiter)
            raise
        finally:
            timer.cancel()
            if waiter in waiting:
                waiting.remove(waiter)
            if self._by_request.get(key) is waiter:
                del self._by_request[key]

    def _again(self, group: Group, waiter: Waiter, key: tuple[str, str, str]) -> list[Handed] | None:
        """The answer that this request got already; None: none, and nobody waits for one of the same request."""
        earlier = self._by_request.get(key)
        if earlier is not None:
            earlier.is_repeated = True
            _end_empty(earlier.answer)
        handed = group.answers.again(*key[1:], waiter.lease_us, self._clock(), waiter.may)
        if handed:
            self._metrics.answers_repeated += 1
            self._schedule.note(group)
        return handed

    def _give_back(self, group: Group, waiter: Waiter) -> None:
        """Return messages that a cancelled poll was just handed: other polls get them."""
        if waiter.is_repeated:
            return  # its messages went to the request that came again
        answer = waiter.answer
        if not answer.cancelled() and answer.exception() is None and self._groups.get(group.name) is group:
            group.give_back(answer.result(), self._clock())
            self.serve(group.name)

    def hand_out(self, group: Group, waiter: Waiter) -> list[Handed]:
        """Messages for a poll that are available now."""
        asked = (waiter.instance, waiter.topics, waiter.max, waiter.lease_us, self._clock(), waiter.may)
        handed = group.receive(*asked, in_runs=waiter.in_runs)
        if handed and waiter.request_id:
            group.answers.note(waiter.instance, waiter.request_id, handed)
        self._schedule.note(group)
        return handed

    def end(self, name: str) -> None:
        """Answer the polls of a group that was dropped, without messages."""
        for waiter in self._by_group.pop(name, ()):
            if not waiter.answer.done():
                waiter.answer.set_result([])

    def leave(self, name: str, instance: str) -> None:
        """Answer the polls of an instance that stops, without messages."""
        for waiter in self._by_group.get(name, ()):
            if waiter.instance == instance:
                _end_empty(waiter.answer)

    def serve(self, name: str) -> None:
        """Hand available messages to the waiting polls of a group."""
        waiting = self._by_group.get(name)
        if not waiting:
            return
        group = self._groups[name]
        for waiter in list(waiting):
            if waiter.answer.done():
                waiting.remove(waiter)
                continue
            try:
                handed = self.hand_out(group, waiter)
            except NotifyError as refusal:
                # The storage's error is for this poll alone, not for the request that made messages available.
                waiting.remove(waiter)
                waiter.answer.set_exception(refusal)
                continue
            if handed:
                waiting.remove(waiter)
                waiter.answer.set_result(handed)
            elif group.has_skipped:
                # The poll's turn of skipping messages is used up: the next poll is first now.
                waiting.remove(waiter)
                waiting.append(waiter)
                break
            elif group.turns.next() is None:
                break  # there are no messages for the next poll either
        if waiting:
            self._serve_on(group)

    def _serve_on(self, group: Group) -> None:
        """If the group stopped after it skipped many messages, schedule the next look, after other work of the loop."""
        if group.has_skipped and not group.is_to_be_served:
            group.is_to_be_served = True
            asyncio.get_running_loop().call_later(group.wait_seconds, self._serve_again, group)

    def _serve_again(self, group: Group) -> None:
        group.is_to_be_served = False
        if self._groups.get(group.name) is group:
            self.serve(group.name)
