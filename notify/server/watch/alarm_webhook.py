"""Posts a notice of each alarm that is raised or cleared to the webhook of the setting `alarm_webhook`."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import structlog

from notify.errors import NotifyError
from notify.protocol.wire import encode_json
from notify.runtime import faults
from notify.server import webhooks
from notify.server.core.core import Core

log = structlog.get_logger("notify.server")

WAITING = 1000
"""The most notices that wait for the webhook; beyond that the oldest is dropped."""
TRIES = 5


class Notices:
    """The notices that wait to be posted, in order."""

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
