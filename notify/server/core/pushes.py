"""Push: messages of a group are posted to its webhook, for services that cannot receive them by themselves.

The body is `{"group", "messages": […]}`, each message with the fields of `POST /v1/groups/{group}/receive` except the
receipt. A status of 2xx acknowledges all of them. A receiver that cannot be reached, or answers 429, 502, 503 or 504,
is unreachable: the same messages are posted until it is back, and no attempt counts. Any other answer is a failure, and
so is a call that times out. A batch that fails is posted again in halves, down to the messages that fail alone: only
these use up an attempt. The subscription says when a message is retried, and when it becomes a dead letter.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from notify.errors import InvalidRequest, NotFound, Unavailable
from notify.protocol.wire import Receive, SettleItem, encode_json, instant
from notify.runtime import faults
from notify.runtime.backoff import Backoff
from notify.runtime.urls import place_of
from notify.server import webhooks
from notify.server.core.core import Core
from notify.server.delivery.leases import Handed
from notify.server.tasks import ended

MOST_IN_ALL = 1000
"""The most calls of all groups at once."""
MODES = ("shared", "ordered")
"""The other modes give a topic to one consumer process, and a webhook is not a process."""
WAIT_SECONDS = 20.0
LEASE_SECONDS = 60.0
CHECK_US = 20_000_000
"""How often a group's modes are checked, to say why nothing is posted; also whenever no message came."""
RETRY_SECONDS, RETRY_MAX_SECONDS = 1.0, 30.0
REASON_CHARACTERS = 300
"""How much of the receiver's answer a failure's reason quotes."""
AWAY = frozenset((429, 502, 503, 504))
INSTANCE = "webhook"

Messages = list[dict[str, Any]]
"""Messages in the JSON of an answer to `receive`."""


@dataclass(frozen=True, slots=True)
class Push:
    """The webhook of a group."""

    url: str
    batch: int = 1
    """The most messages in a call."""
    at_once: int = 4
    """The most calls at once from each server."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last call of a group failed, and since when (microseconds since 1970) all calls have failed."""

    since_us: int
    reason: str


class Pushes:
    """Posts the messages of each group that has a webhook. Methods belong to the event loop."""

    def __init__(self, core: Core, shown: Callable[[list[Handed]], Messages]) -> None:
        """`shown` converts messages that were handed out to JSON's types."""
        self._core = core
        self._shown = shown
        self._running: dict[tuple[str, Push], list[asyncio.Task[None]]] = {}
        self.failing: dict[str, Failure] = {}
        """Groups whose last call failed."""

    def follow(self, pushes: Mapping[str, Push]) -> None:
        """Post to these webhooks, by group, and to no others from now on."""
        if not self._core.has_queues:
            return
        wanted = set(pushes.items())
        for group_and_push in set(self._running) - wanted:
            self.failing.pop(group_and_push[0], None)
            for task in self._running.pop(group_and_push):
                task.cancel()
        for group, push in wanted - set(self._running):
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(self._run(group, push)) for _ in range(push.at_once)]
            self._running[(group, push)] = tasks

    def shown(self) -> dict[str, dict[str, Any]]:
        """The webhooks by group, each with the time since when it fails, and why; null and "" if it does not."""
        rows = {}
        for group, push in sorted(self._running):
            failure = self.failing.get(group)
            since, reason = (None, "") if failure is None else (instant(failure.since_us), failure.reason)
            rows[group] = asdict(push) | {"failing_since": since, "reason": reason}
        return rows

    def check(self, group: str, push: Push, others: Mapping[str, Push]) -> None:
        """Raises InvalidRequest if the address, the group's mode or the number of calls is not allowed, and NotFound if
        the group has no subscription. `others`: the webhooks of all groups."""
        webhooks.check_address(push.url, self._core.settings)
        self._check_modes(group)
        calls = push.at_once + sum(other.at_once for name, other in others.items() if name != group)
        if calls > MOST_IN_ALL:
            raise InvalidRequest(
                f"all groups together would have {calls} calls at once, and {MOST_IN_ALL} are allowed: lower at_once",
                "out_of_bounds",
            )

    async def stop(self) -> None:
        await ended(*(task for tasks in self._running.values() for task in tasks))

    def _check_modes(self, group: str) -> None:
        queues = self._core.queues
        subscriptions = [s for s in (*queues.subscriptions(), *queues.patterns()) if s.group == group]
        if not subscriptions:
            raise NotFound(f"group {group!r} has no subscription: subscribe it first", "not_subscribed")
        for s in subscriptions:
            if s.mode not in MODES:
                raise InvalidRequest(
                    f"group {group!r} receives topic {s.topic!r} in mode {s.mode}; a webhook takes messages in mode "
                    f"{' or '.join(MODES)}",
                    "invalid_push",
                )

    async def _run(self, group: str, push: Push) -> None:
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        request = Receive(instance=INSTANCE, max=push.batch, wait=WAIT_SECONDS, lease=LEASE_SECONDS)
        check_us = 0
        while True:
            try:
                if (now_us := self._core.clock()) >= check_us or self._core.delivery.has_broadcast(group):
                    self._check_modes(group)
                    check_us = now_us + CHECK_US
                # `may` is called again for each message that comes: the mode may have changed during the poll.
                may = functools.partial(self._may_post, group)
                handed = await self._core.delivery.receive(group, request, may)
                check_us = check_us if handed else 0
                try:
                    await self._deliver(group, push, handed)
                except asyncio.CancelledError:  # the webhook was removed or changed: no attempt counts
                    self._core.delivery.give_back(group, handed)
                    raise
                backoff.reset()
            except Exception as error:
                self._fails(group, str(error) or type(error).__name__)
                faults.note("push_failed", error, group=group, url=place_of(push.url))
                await asyncio.sleep(backoff.next())

    def _may_post(self, group: str, topic: str) -> bool:
        return self._core.delivery.mode_of(group, topic) in MODES

    async def _deliver(self, group: str, push: Push, handed: list[Handed]) -> None:
        """Post messages until each is taken or refused, its lease has expired, or the group is paused."""
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        messages = self._shown(handed)
        parts = [messages] if messages else []
        while parts:
            part = parts.pop()
            is_away, reason = await self._post(group, push, part)
            if not reason:
                self.failing.pop(group, None)
                backoff.reset()
                await self._settle(group, part, "ack")
            else:
                self._fails(group, reason)
                if is_away:
                    await asyncio.sleep(backoff.next())
                    if self._core.delivery.is_paused(group):
                        self._core.delivery.give_back(group, handed)
                        return
                    parts.append(part)
                elif len(part) == 1:
                    await self._settle(group, part, "retry", reason)
                else:
                    half = len(part) // 2
                    parts += (part[half:], part[:half])
            parts = await self._renewed(group, parts)

    async def _post(self, group: str, push: Push, messages: Messages) -> tuple[bool, str]:
        """(whether the receiver is unreachable, why it did not take the messages: "" if it did)."""
        without_receipts = [
            {name: value for name, value in message.items() if name != "receipt"} for message in messages
        ]
        body = encode_json({"group": group, "messages": without_receipts})
        try:
            status, answer = await webhooks.send(push.url, body, self._core.settings)
        except Unavailable as error:
            return isinstance(error, webhooks.Unreachable), str(error)
        except InvalidRequest as error:  # after a restart with another allow-list, or without a secret
            return True, str(error)
        if 200 <= status < 300:
            return False, ""
        said = webhooks.said(push.url, answer, REASON_CHARACTERS)
        return status in AWAY, f"webhook {place_of(push.url)} answered {status}" + (f": {said}" if said else "")

    async def _renewed(self, group: str, parts: list[Messages]) -> list[Messages]:
        """Renew the leases of messages; the result is the messages whose leases still hold."""
        if not parts:
            return []
        items = [SettleItem(m["receipt"], "renew", lease=LEASE_SECONDS) for part in parts for m in part]
        answers = iter(await self._core.delivery.settle(group, items))
        still_leased = ([m for m in part if next(answers).status == 200] for part in parts)
        return [part for part in still_leased if part]

    async def _settle(
        self, group: str, messages: Messages, action: Literal["ack", "retry"], reason: str | None = None
    ) -> None:
        """Settle messages. If the storage is unavailable (its disk may be full), try until their leases have expired.

        Raises Unavailable then: the messages are posted again.
        """
        items = [SettleItem(m["receipt"], action, reason=reason) for m in messages]
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        until_us = self._core.clock() + round(LEASE_SECONDS * 1e6)
        while True:
            try:
                await self._core.delivery.settle(group, items)
                return
            except Unavailable:
                if self._core.clock() > until_us:
                    raise
                await asyncio.sleep(backoff.next())

    def _fails(self, group: str, reason: str) -> None:
        previous = self.failing.get(group)
        self.failing[group] = Failure(self._core.clock() if previous is None else previous.since_us, reason)
