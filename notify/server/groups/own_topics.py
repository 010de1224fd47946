"""The topics of this server's own queues."""

from __future__ import annotations

import heapq
from typing import Any

from notify.errors import NotFound
from notify.server.core.core import Core
from notify.server.topics import described
from notify.storage.names import DEAD_LETTER_PREFIX, RETRY_PREFIX

INTERNAL = (DEAD_LETTER_PREFIX, RETRY_PREFIX)
MOST_LAGS = 1000
"""Topics whose lag a list shows: it asks for each queue of each group."""


class OwnTopics:
    """Every method raises WrongRole where the server has no queues."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def listed(self, prefix: str, after: str, most: int, *, internal: bool = True) -> dict[str, Any]:
        queues = self._core.queues
        known = {t.name: t for t in queues.topics() if internal or not t.name.startswith(INTERNAL)}
        names = heapq.nsmallest(most, (n for n in known if n > after and n.startswith(prefix)))
        rows = [described(queues, known[name]) for name in names]
        if len(rows) <= MOST_LAGS:
            rows = [row | {"lag": self._core.delivery.followers.lag(row["name"])} for row in rows]
        return {"topics": rows, "of": len(known)}

    async def one(self, name: str) -> dict[str, Any]:
        topic = self._core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return described(self._core.queues, topic)

    async def groups_of(self, name: str) -> list[dict[str, Any]]:
        await self.one(name)
        subscriptions = self._core.delivery.followers.subscriptions_of(name)
        return [{"group": s.group, "mode": s.mode, "lag": lag} for s, lag in subscriptions]
