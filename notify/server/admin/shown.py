"""Representations that several admin routes share."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from notify import ids
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.storage.records import State, StoredMessage, Transaction
from notify.wire import instant


def transaction_row(t: Transaction, now_us: int, shard: str = "") -> dict[str, Any]:
    """A transaction as it is shown; `shard`: the server's only one, where its storage does not consist of several."""
    # A storage of shards has no queues: its messages have no place here.
    shown = json_pulled if t.state is State.COMMITTED and not t.shard else json_unplaced
    rows = [shown(m) | {"topic": m.topic} for m in t.messages if not m.corrupt]
    return {
        "id": ids.to_text(t.id),
        "producer_group": t.producer_group,
        "state": t.state.name,
        "source": t.source,
        "instance": t.instance,
        "shard": t.shard or shard,
        "stored_at": instant(t.stored_us),
        "age": round((now_us - t.stored_us) / 1e6, 3),
        "decided_at": instant(t.decided_us) if t.decided_us else None,
        "checks_answered": t.attempts,
        "next_check_at": instant(t.next_check_us) if t.next_check_us else None,
        "messages": [_bare(row) if t.without_bodies else row for row in rows],
    } | ({"bodies_left_out": True} if t.without_bodies else {})


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("body", "body_base64")}


def json_unplaced(m: StoredMessage) -> dict[str, Any]:
    """A message of a transaction, which says nothing of a queue: it may be in none yet, or never."""
    return {name: value for name, value in json_pulled(m).items() if name not in ("queue", "offset", "committed_at")}


def receivers(core: Core, topic: str, tag: str | None) -> list[str] | None:
    """The groups that a message of this topic and tag goes to; None where another server has the queues.

    A group with a filter is named, too: whether the filter is true for a message shows when it is delivered.
    """
    if not core.has_queues:
        return None
    subscribed = [s for s, _ in core.delivery.followers.subscriptions_of(topic)]
    if not core.queues.has_topic(topic):
        subscribed += [s for s in core.queues.patterns() if fnmatchcase(topic, s.topic)]
    return sorted({s.group for s in subscribed if not s.tags or tag in s.tags})
