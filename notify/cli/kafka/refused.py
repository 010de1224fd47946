"""`notify refused` for a Kafka cluster: delayed messages that their topics refused when they were due."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.protocol.wire import instant


def _list(url: str) -> Any:
    try:
        from notify.kafka.cluster import Cluster
        from notify.kafka.undelivered import UndeliveredList
    except ImportError as error:
        raise InvalidRequest(f"Kafka needs the extra kafka: pip install 'notify-tx[kafka]' ({error})") from None
    return UndeliveredList(Cluster.of(url))


def listed(url: str, state: str | None, after: str, most: int) -> tuple[int, list[dict[str, Any]]]:
    """The number of messages that wait for a decision, and at most `most` messages of a state after an offset."""
    from notify.kafka.undelivered import CODE, STATES, WAITING

    if state is not None and state not in STATES:
        raise InvalidRequest(f"--state {state}: over Kafka it is one of {', '.join(STATES)}")
    from_offset = digits(after) if after else -1
    if from_offset is None:
        raise InvalidRequest(f"--after {after[:40]}: over Kafka it is an offset of the list")
    messages = _list(url)
    decided = messages.decisions()
    waiting = 0
    rows: list[dict[str, Any]] = []
    for message in messages.read():
        decision = decided.of(message)
        waiting += decision is None
        message_state = decision.state if decision is not None else WAITING
        if len(rows) < most and message.offset > from_offset and state in (None, message_state):
            rows.append(
                {
                    "offset": message.offset,
                    "id": message.id,
                    "topic": message.topic,
                    "code": CODE,
                    "detail": message.detail,
                    "state": message_state,
                    "reason": decision.reason if decision is not None else "",
                    "refused_at": instant(message.refused_us),
                }
            )
    return waiting, rows


def decide(url: str, ids: Sequence[str], reason: str, *, send: bool, dry_run: bool) -> dict[str, Any]:
    """Send or drop the messages with these ids, or all that wait; returns the command's answer."""
    messages = _list(url)
    chosen = set(ids) or None
    if dry_run:
        decided = messages.decisions()
        waiting = (m for m in messages.read() if decided.of(m) is None and (chosen is None or m.id in chosen))
        items = [{"id": m.id, "topic": m.topic, "status": 200} for m in itertools.islice(waiting, 10_000)]
    else:
        items = messages.retry(chosen, reason) if send else messages.drop(chosen, reason)
    missing = sorted((chosen or set()) - {item["id"] for item in items})
    return {"dry_run": dry_run, "messages": items, "not_on_the_list": missing}
