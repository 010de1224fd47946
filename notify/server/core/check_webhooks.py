"""Checks for producers that cannot poll: the server polls for their group, and posts the checks to its webhook.

The body is what a poll answers, `{"producer_group", "checks": […]}`; the webhook answers `{"outcomes": […]}` with the
fields of `POST /v1/transactions/outcomes`. A check without an answer counts as `unavailable`, and uses up no attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from notify.errors import NotifyError
from notify.protocol.wire import UNDECODABLE, OutcomeItem, Outcomes, Poll, encode_json
from notify.runtime import faults
from notify.runtime.backoff import Backoff
from notify.runtime.urls import place_of
from notify.server import webhooks
from notify.server.core.core import Core
from notify.server.tasks import ended

POLL_SECONDS = 5.0
AT_ONCE = 50
RETRY_SECONDS, RETRY_MAX_SECONDS = 1.0, 30.0
INSTANCE = "webhook"


class _Answer(msgspec.Struct):
    outcomes: list[OutcomeItem]


_decode = msgspec.json.Decoder(_Answer).decode


class CheckWebhooks:
    """A poller for each group that has a webhook."""

    def __init__(self, core: Core, shown: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`shown` converts a check of a poll to JSON's types."""
        self._core = core
        self._shown = shown
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    def follow(self, urls: Mapping[str, str]) -> None:
        """Post to these webhooks, by group, and to no others from now on."""
        wanted = set(urls.items())
        for group_and_url in set(self._running) - wanted:
            self._running.pop(group_and_url).cancel()
        for group, url in wanted - set(self._running):
            self._running[(group, url)] = asyncio.get_running_loop().create_task(self._run(group, url))

    async def stop(self) -> None:
        await ended(*self._running.values())

    async def _run(self, group: str, url: str) -> None:
        backoff = Backoff(RETRY_SECONDS, RETRY_MAX_SECONDS)
        while True:
            poll = Poll(producer_group=group, instance=INSTANCE, wait=POLL_SECONDS, max=AT_ONCE)
            try:
                checks = await self._core.checks.poll(poll)
                if checks:
                    await self._ask(group, url, checks)
                backoff.reset()
            except Exception as error:
                faults.note("check_webhook_failed", error, group=group, url=place_of(url))
                await asyncio.sleep(backoff.next())

    async def _ask(self, group: str, url: str, checks: list[dict[str, Any]]) -> None:
        body = encode_json({"producer_group": group, "checks": [self._shown(check) for check in checks]})
        answered: list[OutcomeItem] = []
        reason, failed = "the webhook did not answer this check", None
        try:
            answered = _decode(await webhooks.post(url, body, self._core.settings)).outcomes
        except (NotifyError, *UNDECODABLE) as error:
            reason, failed = str(error)[:300], error
        outcomes = [_outcome(check, answered, reason) for check in checks]
        request = Outcomes(producer_group=group, outcomes=outcomes)
        await self._core.outcomes.record(request.producer_group, request.outcomes)
        if isinstance(failed, NotifyError):
            raise failed


def _outcome(check: dict[str, Any], answered: Sequence[OutcomeItem], reason: str) -> OutcomeItem:
    """The webhook's answer to a check; UNKNOWN with `reason` if it gave none."""
    transaction_id, shard, token = str(check["id"]), str(check["shard"]), str(check["token"])
    for o in answered:
        if o.id == transaction_id and o.shard in (None, shard):  # a half may be on two shards, each with its own check
            return OutcomeItem(
                id=transaction_id,
                outcome=o.outcome,
                shard=shard,
                check=token,
                unavailable=o.unavailable,
                reason=o.reason,
            )
    return OutcomeItem(id=transaction_id, outcome="UNKNOWN", shard=shard, check=token, unavailable=True, reason=reason)
