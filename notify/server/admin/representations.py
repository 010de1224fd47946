"""Representations that several admin routes share."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from notify.protocol import ids
from notify.protocol.wire import NO_DATABASE, instant
from notify.server.core.core import Core
from notify.server.data.encode import json_pulled
from notify.storage.records import State, StoredMessage, Transaction


def transaction_row(transaction: Transaction, now_us: int, shard: str = "") -> dict[str, Any]:
    """A transaction as a JSON object; `shard`: the server's shard, if its storage has only one."""
    # A storage of several shards has no queues, so that its messages have no offsets.
    encode = json_pulled if transaction.state is State.COMMITTED and not transaction.shard else json_unplaced
    rows = [encode(m) | {"topic": m.topic} for m in transaction.messages if not m.corrupt]
    return {
        "id": ids.to_text(transaction.id),
        "producer_group": transaction.producer_group,
        "state": transaction.state.name,
        "source": "" if transaction.source == NO_DATABASE else transaction.source,
        "instance": transaction.instance,
        "shard": transaction.shard or shard,
        "stored_at": instant(transaction.stored_us),
        "age": round((now_us - transaction.stored_us) / 1e6, 3),
        "decided_at": instant(transaction.decided_us) if transaction.decided_us else None,
        "unknown_answers": transaction.attempts,
        "checks_answered": transaction.attempts,  # its name up to 3b0672b0, which older clients read
        "next_check_at": instant(transaction.next_check_us) if transaction.next_check_us else None,
        "messages": [_without_body(row) if transaction.without_bodies else row for row in rows],
    } | ({"bodies_left_out": True} if transaction.without_bodies else {})


def _without_body(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("body", "body_base64")}


def json_unplaced(message: StoredMessage) -> dict[str, Any]:
    """A message as a JSON object without queue, offset and commit time: it may be in no queue yet, or never be."""
    return {
        name: value for name, value in json_pulled(message).items() if name not in ("queue", "offset", "committed_at")
    }


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
