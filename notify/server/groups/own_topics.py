"""The topics of this server's own queues."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from notify.errors import NotFound
from notify.protocol.wire import instant
from notify.server.core.core import Core
from notify.server.message_pages import backwards
from notify.server.topics import described
from notify.storage.names import DEAD_LETTER_PREFIX, RETRY_PREFIX

INTERNAL = (DEAD_LETTER_PREFIX, RETRY_PREFIX)
READ_BYTES = 1 << 20
MOST_READ = 1000
"""The most queues whose last message is read for a list of topics; further topics get no time."""
MOST_LAGS = 1000
"""The most topics for which a list shows lags: each lag costs a look at each queue of each group."""
MOST_LOOKED_AT = 20
"""The most messages of a topic whose producer groups are looked up."""
MOST_QUEUES = 32
"""The most queues of a topic in which these are looked for."""


class OwnTopics:
    """The own topics. Every method raises WrongRole if the server has no queues."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def listed(self, prefix: str, after: str, most: int, *, internal: bool = True) -> dict[str, Any]:
        queues = self._core.queues
        by_name = {t.name: t for t in queues.topics() if internal or not t.name.startswith(INTERNAL)}
        names = heapq.nsmallest(most, (n for n in by_name if n > after and n.startswith(prefix)))
        rows = [described(queues, by_name[name]) for name in names]
        if len(rows) <= MOST_LAGS:
            rows = [row | {"lag": self._core.delivery.followers.lag(row["name"])} for row in rows]
        return {"topics": rows, "of": len(by_name)}

    async def one(self, name: str) -> dict[str, Any]:
        topic = self._core.queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        return described(self._core.queues, topic)

    async def newest_at(self, names: Sequence[str]) -> dict[str, str]:
        newest: dict[str, str] = {}
        left = MOST_READ
        for name in names:
            topic = self._core.queues.topic(name)
            left -= 0 if topic is None else topic.queues
            if left < 0:
                break
            times = [self._newest_us(name, queue) for queue in range(topic.queues)] if topic is not None else []
            if any(times):
                newest[name] = instant(max(times))
        return newest

    def _newest_us(self, name: str, queue: int) -> int:
        """When the last message of a queue was committed, in microseconds; 0 if it has none."""
        start, end = self._core.queues.bounds(name, queue)
        last = self._core.queues.read(name, queue, end - 1, 1, READ_BYTES) if end > start else []
        # No message has the last offset in a log that was just restored from a store.
        newest = last[0] if last else next(backwards(self._core.queues, name, queue, end), None)
        return newest.committed_us if newest else 0

    async def groups_of(self, name: str) -> list[dict[str, Any]]:
        await self.one(name)
        subscriptions = self._core.delivery.followers.subscriptions_of(name)
        return [{"group": s.group, "mode": s.mode, "lag": lag} for s, lag in subscriptions]

    async def senders_of(self, name: str) -> dict[str, Any]:
        queues = self._core.queues
        topic = queues.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name[:100]!r}")
        # The index alone is read: a console's page asks every few seconds.
        latest: list[tuple[int, bytes]] = []
        for queue in range(min(topic.queues, MOST_QUEUES)):
            _, end = queues.bounds(name, queue)
            latest += queues.read_ids(name, queue, max(0, end - MOST_LOOKED_AT), MOST_LOOKED_AT)
        newest = heapq.nlargest(MOST_LOOKED_AT, latest)
        groups = await queues.producer_groups([transaction_id for _, transaction_id in newest])
        sent = [(group or "", at_us) for group, (at_us, _) in zip(groups, newest, strict=True)]
        counts = Counter(group for group, _ in sent)
        last_us: dict[str, int] = {}
        for group, at_us in sent:
            last_us.setdefault(group, at_us)
        rows = [
            {
                "producer_group": group,
                "messages": count,
                "newest_at": instant(last_us[group]),
                "is_online": self._core.checks.is_online(group) if group else None,
            }
            for group, count in sorted(counts.items(), key=lambda item: (-item[1], item[0] == "", item[0]))
        ]
        first = {"first_at": instant(newest[-1][0])} if newest else {}
        return {"senders": rows, "looked_at": len(newest)} | first
