"""The offset at which a subscription starts, from `earliest`, `latest`, an offset or an instant."""

from __future__ import annotations

from datetime import datetime

from notify.errors import InvalidRequest
from notify.protocol.wire import microseconds
from notify.storage.queues import Store

Start = str | int | datetime


def offset_of(store: Store, topic: str, queue: int, start: Start, now_us: int) -> int:
    """The offset of a queue at which a subscription starts. Raises InvalidRequest if `start` is not a position."""
    first, end = store.bounds(topic, queue)
    if isinstance(start, bool):
        raise InvalidRequest("start is earliest, latest, an offset or an instant", "invalid_start")
    if isinstance(start, int):
        if not first <= start <= end:
            raise InvalidRequest(
                f"offset {start} is beyond what queue {queue} of topic {topic!r} holds: {first} to {end}",
                "out_of_bounds",
            )
        return start
    if start == "earliest":
        return first
    if start == "latest":
        return end
    if isinstance(start, str):
        text = start
        try:
            start = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidRequest(
                f"start {text[:40]!r} is not earliest, latest, an offset or an instant", "invalid_start"
            ) from None
    try:
        time_us = microseconds(start)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_start") from None
    if time_us > now_us:
        raise InvalidRequest(f"{start.isoformat()} is in the future; `latest` begins now", "out_of_bounds")
    return store.offset_at(topic, queue, time_us)
