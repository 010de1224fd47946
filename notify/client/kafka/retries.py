"""Retries: when a failed message is handled again, and the record of it that goes to another topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from notify.client.handling.handlers import Handler, reason_of
from notify.client.kafka.window import Item, Window
from notify.errors import DeadLetter
from notify.kafka import records
from notify.kafka.groups import DEAD_LETTER, dead_letter_topic, retry_partition, retry_topic
from notify.kafka.records import Headers
from notify.runtime.clock import steady_clock

MAX_ATTEMPTS, RETRY_MIN_SECONDS, RETRY_MAX_SECONDS = 16, 1.0, 300.0
"""The policy for a message of a topic without a handler in this instance."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A record that goes to another topic, as a retry or a dead letter. `partition`: -1 chooses it by the key."""

    window: Window
    item: Item
    topic: str
    partition: int
    headers: Headers
    has_body: bool = True


def wait_of(handler: Handler | None, attempt: int) -> float:
    """The wait in seconds before the attempt that follows `attempt`."""
    first, most = (handler.retry_min, handler.retry_max) if handler else (RETRY_MIN_SECONDS, RETRY_MAX_SECONDS)
    return float(min(first * 2.0 ** min(attempt - 1, 60), most))


def is_last(handler: Handler | None, attempt: int, error: BaseException) -> bool:
    return isinstance(error, DeadLetter) or attempt >= most_attempts(handler)


def most_attempts(handler: Handler | None) -> int:
    return handler.max_attempts if handler else MAX_ATTEMPTS


def dead_letter(group: str, window: Window, item: Item, topic: str, error: BaseException) -> Departure:
    """The departure of a message of `topic` that becomes a dead letter."""
    reason = reason_of(error, named=not isinstance(error, DeadLetter))
    headers = _headers(item.record, {records.TARGET: topic, records.REASON: reason, records.ATTEMPT: item.attempt})
    return Departure(window, item, dead_letter_topic(group), -1, headers)


def retry(group: str, window: Window, item: Item, topic: str, seconds: float, error: BaseException) -> Departure:
    """The departure of a message of `topic` that is handled again after `seconds`."""
    changed: dict[str, str | int] = {
        records.TARGET: topic,
        records.REASON: reason_of(error),
        records.ATTEMPT: item.attempt + 1,
        records.DUE: due_after(seconds),
    }
    return Departure(window, item, retry_topic(group), retry_partition(seconds), _headers(item.record, changed))


def without_body(group: str, departure: Departure) -> Departure:
    """A dead letter without body and key, for a record that is too large for another topic: it names the record."""
    record = departure.item.record
    place = f"{record.topic()}/{record.partition()}@{record.offset()}"
    kept_names = (records.ID, records.TARGET, records.ATTEMPT)
    headers: Headers = [header for header in departure.headers if header[0] in kept_names]
    reason = f"too large for a retry or a dead letter; its body is at {place} as long as that topic keeps it"
    headers.append((records.REASON, reason.encode()))
    return Departure(departure.window, departure.item, dead_letter_topic(group), -1, headers, has_body=False)


def due_after(seconds: float) -> int:
    """The instant `seconds` from now, in microseconds since 1970."""
    return steady_clock() + round(seconds * 1_000_000)


def id_of(record: Any) -> str:
    """A message's id; for a record of another producer, without an id, the place where it was first written."""
    message_id = records.header(records.listed(record), records.ID)
    return message_id or f"{record.topic()}/{record.partition()}@{record.offset()}"


def _headers(record: Any, changed: Mapping[str, str | int]) -> Headers:
    changed = {**changed, records.ID: id_of(record)}
    headers = records.listed(record)
    if record.topic().startswith(DEAD_LETTER):  # keep the letter's first reason with the reason of this failure
        changed |= {records.ESCAPED + name: text for name, text in records.why_dead(headers).items()}
    unchanged: Headers = [header for header in headers if header[0] not in (*changed, records.DUE)]
    return [*unchanged, *((name, str(value).encode()) for name, value in changed.items())]
