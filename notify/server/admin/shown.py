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
    """A transaction as a JSON object; `shard`: the server's shard, if its storage has only one."""
    # A storage of several shards has no queues, so that its messages have no offsets.
    encode = json_pulled if t.state is State.COMMITTED and not t.shard else json_unplaced
    rows = [encode(m) | {"topic": m.topic} for m in t.messages if not m.corrupt]
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
        "messages": [_without_body(row) if t.without_bodies else row for row in rows],
    } | ({"bodies_left_out": True} if t.without_bodies else {})


def _without_body(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("body", "body_base64")}


def json_unplaced(m: StoredMessage) -> dict[str, Any]:
    """A message as a JSON object without queue, offset and commit time: it may be in no queue yet, or never be."""
    return {name: value for name, value in json_pulled(m).items() if name not in ("queue", "offset", "committed_at")}


def receivers(core: Core, topic: str, tag: str | None) -> list[str] | None:
    """The groups that receive a message of this topic and tag; None if another server has the queues.

    Groups with a filter are included, because a filter is evaluated only when a message is delivered.
    """
    if not core.has_queues:
        return None
    subscribed = [s for s, _ in core.delivery.followers.subscriptions_of(topic)]
    if not core.queues.has_topic(topic):
        subscribed += [s for s in core.queues.patterns() if fnmatchcase(topic, s.topic)]
    return sorted({s.group for s in subscribed if not s.tags or tag in s.tags})
