"""Packing: encodes a message for the wire, and refuses what the server would refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from notify.client.bodies.sending import LargeBodies
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.limits import (
    LIMITS,
    SCHEDULED_BYTES,
    body_too_large,
    check_between,
    check_delay,
    check_headers,
    check_key,
    check_name,
)
from notify.protocol.message import Message, as_text, encode_body, number_of_seconds, resolve_key, utf8
from notify.protocol.wire import PackedMessage, PackedSchedule
from notify.protocol.withdrawal import DEDUPE, KEEP, OWN, check_own

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_ELSEWHERE = "and more in a store: give the producer store="
_SCHEDULED = f"and {SCHEDULED_BYTES} in a schedule's: name what the consumer shall read itself"


def pack(message: Message, bodies: LargeBodies | None = None, larger: str = _ELSEWHERE) -> PackedMessage:
    """Encode a message, with its key, for the wire. `bodies`, `larger`: see `pack_unkeyed`. Raises InvalidRequest."""
    packed = pack_unkeyed(message, bodies, larger)
    if message.key is not None:
        give_key(packed, message)
    return packed


def pack_unkeyed(message: Message, bodies: LargeBodies | None = None, larger: str = _ELSEWHERE) -> PackedMessage:
    """Encode a message, without its key, for the wire. Raises InvalidRequest.

    `bodies`: stores or compresses large bodies; have it `upload` them before the message is sent. None: nothing does.
    `larger`: what to do with a body that is too large, for the error.
    This refuses everything that the server would refuse, because a request carries messages of many callers, and one
    malformed message would fail them all. Only the bound of `deliver_at` is left to the server and its clock.
    """
    try:
        topic = message.topic
    except AttributeError:
        raise InvalidRequest(
            f"this is a {type(message).__name__}, not a message: write Message(topic, body)", "invalid_message"
        ) from None
    if type(topic) is not str:
        topic = as_text("a topic", topic)
    check_name("topic", topic)
    body, headers = encode_body(message)
    if bodies is not None:
        body, headers = bodies.made_small(body, headers)
    if len(body) > LIMITS.message_bytes:
        raise body_too_large(len(body), f" in a message, {larger}")
    if headers:
        check_headers(headers)
    tag = message.tag
    if tag is not None:
        tag = as_text("a tag", tag)
        check_name("tag", tag)
    delay, deliver_at, ttl = message.delay, message.deliver_at, message.ttl
    if delay is not None:
        delay = number_of_seconds("delay", delay)
        check_delay(delay, deliver_at, 0)
    elif deliver_at is not None:
        deliver_at = _in_utc(deliver_at)
    if ttl is not None:
        ttl = number_of_seconds("ttl", ttl)
        check_between("ttl", ttl, LIMITS.ttl_min_seconds, LIMITS.ttl_seconds)
    if message.dedupe is not None or message.within is not None:
        headers, delay = _deduped(message, headers)
    if headers and not OWN.isdisjoint(headers):
        check_own(topic, headers, body, delay, deliver_at, ttl)
    return PackedMessage(topic=topic, body=body, tag=tag, headers=headers, delay=delay, deliver_at=deliver_at, ttl=ttl)


def pack_schedule(
    message: Message,
    cron: str | None,
    every: float | timedelta | None,
    zone: str | ZoneInfo,
    catch_up: str,
    catch_up_most: int,
) -> PackedSchedule:
    """Encode a schedule for the wire. Raises InvalidRequest; what a cron expression and a zone mean, the server
    checks."""
    packed = pack(message, larger=_SCHEDULED)
    if packed.delay is not None or packed.deliver_at is not None:
        raise InvalidRequest("a schedule's message has no delay: let the schedule be due later", "invalid_schedule")
    if (cron is None) == (every is None):
        raise InvalidRequest("a schedule has either cron= or every=: give exactly one of them", "invalid_schedule")
    seconds = None
    if every is not None:
        seconds = every.total_seconds() if isinstance(every, timedelta) else number_of_seconds("every", every)
    if type(catch_up_most) is not int:
        raise InvalidRequest(f"catch_up_most is {catch_up_most!r:.60}: it should be a number", "invalid_schedule")
    return PackedSchedule(
        message=packed,
        cron=None if cron is None else as_text("cron", cron),
        every=seconds,
        zone=as_text("zone", getattr(zone, "key", zone)),  # a ZoneInfo, or a name
        catch_up=as_text("catch_up", catch_up),
        catch_up_most=catch_up_most,
    )


def _deduped(message: Message, headers: dict[str, str] | None) -> tuple[dict[str, str], float]:
    """The headers and the delay of a message of which one is pending at a time. Raises InvalidRequest."""
    if message.dedupe is None or message.within is None or message.delay is not None or message.deliver_at is not None:
        raise InvalidRequest(
            "dedupe needs within, the seconds for which one message of the key is pending, and no delay or deliver_at",
            "invalid_dedupe",
        )
    key = as_text("dedupe", message.dedupe if isinstance(message.dedupe, str) else str(message.dedupe))
    utf8("dedupe", key)
    headers = (headers or {}) | {DEDUPE: key, KEEP: message.keep}
    check_headers(headers)
    within = number_of_seconds("within", message.within)
    check_between("within", within, LIMITS.ttl_min_seconds, LIMITS.delay_seconds)
    return headers, within


def pack_all(messages: Sequence[Message], bodies: LargeBodies | None = None) -> list[PackedMessage]:
    """Encode the messages of one half for the wire. `bodies`: see `pack_unkeyed`. Raises InvalidRequest."""
    if isinstance(messages, Message):
        raise InvalidRequest("prepare takes a list of messages: write prepare([message])", "invalid_message")
    return [pack(message, bodies) for message in messages]


def _in_utc(deliver_at: object) -> datetime:
    """The instant in UTC, of the exact type datetime even for a subclass such as pendulum's. Raises InvalidRequest if
    `deliver_at` is not an instant, or outside of the years that datetime knows."""
    if isinstance(deliver_at, datetime) and deliver_at.utcoffset() is not None:
        with contextlib.suppress(OverflowError):
            moment = deliver_at.astimezone(UTC)
            if type(moment) is datetime:
                return moment
            return datetime(*moment.timetuple()[:6], moment.microsecond, UTC)
    raise InvalidRequest(
        f"deliver_at is {deliver_at!r:.60}: it should be an instant with its time zone, such as datetime.now(UTC)",
        "invalid_delay",
    )


def give_key(packed: PackedMessage, message: Message) -> None:
    """Set the key of the encoded message, calling the key if it is a callable.

    Raises InvalidRequest, also if the callable fails. A DBAPIError of the callable is raised unchanged, because code
    that retries transactions looks for it.
    """
    try:
        key = resolve_key(message)
    except (NotifyError, DBAPIError):
        raise
    except Exception as error:
        raise InvalidRequest(
            f"the key of a message to {message.topic!r} is a function that failed: {type(error).__name__}: {error}. It "
            "is called just before the COMMIT: an object that it reads must be in this session then",
            "invalid_key",
        ) from error
    if key is not None:
        utf8("the key", key)
        check_key(key)
        packed.key = key


def size_of_message(message: PackedMessage) -> int:
    """An upper bound of the message's bytes in a request; a character of a key or header has at most 4 bytes."""
    size = 128 + len(message.topic) + len(message.body or b"") + 4 * len(message.key or "")
    if message.headers:
        size += sum([16 + 4 * (len(name) + len(value)) for name, value in message.headers.items()])
    return size
