"""Messages that failed: when they are handled again, and the record that goes to another topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.client.handlers import Handler, reason_of
from notify.client.kafka.window import Item, Window
from notify.clock import steady_clock
from notify.errors import DeadLetter
from notify.kafka import records
from notify.kafka.groups import DEAD_LETTER, dead_letter_topic, retry_partition, retry_topic
from notify.kafka.records import Headers

MAX_ATTEMPTS, RETRY_MIN_SECONDS, RETRY_MAX_SECONDS = 16, 1.0, 300.0
"""The policy for a message of a topic that this instance has no handler for."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A record that leaves a window for another topic: a retry or a dead letter. `partition`: -1 by the key."""

    window: Window
    item: Item
    topic: str
    partition: int
    headers: Headers
    has_body: bool = True


def wait_of(handler: Handler | None, attempt: int) -> float:
    """Seconds until the attempt after this one."""
    first, most = (handler.retry_min, handler.retry_max) if handler else (RETRY_MIN_SECONDS, RETRY_MAX_SECONDS)
    return float(min(first * 2.0 ** min(attempt - 1, 60), most))


def is_last(handler: Handler | None, attempt: int, error: BaseException) -> bool:
    return isinstance(error, DeadLetter) or attempt >= most_attempts(handler)


def most_attempts(handler: Handler | None) -> int:
    return handler.max_attempts if handler else MAX_ATTEMPTS


def dead_letter(group: str, window: Window, item: Item, topic: str, error: BaseException) -> Departure:
    """A message of `topic` that is not to be handled again by itself."""
    reason = reason_of(error, named=not isinstance(error, DeadLetter))
    headers = _headers(item.record, {records.TARGET: topic, records.REASON: reason, records.ATTEMPT: item.attempt})
    return Departure(window, item, dead_letter_topic(group), -1, headers)


def retry(group: str, window: Window, item: Item, topic: str, seconds: float, error: BaseException) -> Departure:
    """A message of `topic` that is handled again after so many seconds."""
    changed: dict[str, str | int] = {
        records.TARGET: topic,
        records.REASON: reason_of(error),
        records.ATTEMPT: item.attempt + 1,
        records.DUE: due_after(seconds),
    }
    return Departure(window, item, retry_topic(group), retry_partition(seconds), _headers(item.record, changed))


def without_body(group: str, departure: Departure) -> Departure:
    """A dead letter without body and key for a record that no other topic takes: it says where the record is."""
    record = departure.item.record
    place = f"{record.topic()}/{record.partition()}@{record.offset()}"
    kept = (records.ID, records.TARGET, records.ATTEMPT)
    headers: Headers = [header for header in departure.headers if header[0] in kept]
    reason = f"too large for a retry or a dead letter; its body is at {place} as long as that topic keeps it"
    headers.append((records.REASON, reason.encode()))
    return Departure(departure.window, departure.item, dead_letter_topic(group), -1, headers, has_body=False)


def due_after(seconds: float) -> int:
    """The instant so many seconds from now, in microseconds since 1970."""
    return steady_clock() + round(seconds * 1_000_000)


def id_of(record: Any) -> str:
    """A message's id. One of another producer, which has none, is named by the place where it was first."""
    known = records.header(records.listed(record), records.ID)
    return known or f"{record.topic()}/{record.partition()}@{record.offset()}"


def _headers(record: Any, changed: Mapping[str, str | int]) -> Headers:
    changed = {**changed, records.ID: id_of(record)}
    headers = records.listed(record)
    if record.topic().startswith(DEAD_LETTER):  # the letter's own reason stays, beside why its reader failed
        changed |= {records.ESCAPED + name: text for name, text in records.why_dead(headers).items()}
    kept: Headers = [h for h in headers if h[0] not in (*changed, records.DUE)]
    return [*kept, *((name, str(value).encode()) for name, value in changed.items())]
