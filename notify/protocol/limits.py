"""The bounds of requests, and checks of values against them. A value beyond a bound is an error and never clamped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import Literal

from notify.errors import InvalidRequest, TooLarge
from notify.protocol.wire import microseconds

Mode = Literal["shared", "ordered", "exclusive", "failover", "broadcast"]
MODES: tuple[Mode, ...] = ("shared", "ordered", "exclusive", "failover", "broadcast")
"""How the instances of a group share a topic's messages."""
OnExhausted = Literal["dead_letter", "hold"]
ON_EXHAUSTED: tuple[OnExhausted, ...] = ("dead_letter", "hold")
"""The fates of a message that has used up its attempts: a dead letter, or in ordered mode it holds its key."""
OWNED: tuple[Mode, ...] = ("exclusive", "failover")
"""The modes in which one instance owns the topic."""

FAIR: tuple[Mode, ...] = ("shared", "ordered")
"""The modes in which tenants can take turns."""
FAIR_BY = r"(key|header:[^\x00-\x1f]{1,127})?"
"""The texts that say what names the tenants; empty: they take no turns."""

NAME_CHARACTERS = 127
"""The most characters in the name of a topic, group, source or tag."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}\Z")


@dataclass(frozen=True, slots=True)
class Limits:
    """All bounds. Sizes are in bytes, times in seconds."""

    message_bytes: int = 1 << 20
    request_bytes: int = 8 << 20
    items: int = 4096
    messages_per_transaction: int = 100
    headers: int = 32
    headers_bytes: int = 8 << 10
    key_bytes: int = 1024
    delay_seconds: float = 40 * 86_400
    ttl_min_seconds: float = 0.1
    ttl_seconds: float = 3650 * 86_400
    wait_seconds: float = 60
    max_messages: int = 10_000
    topics: int = 1_000
    """The most topics that a request to receive, and topics and sources that a poll for checks, may name."""
    reply_bytes: int = 8 << 20
    connections: int = 10_000
    """The most connections to a server; the default of the setting `connections`."""
    operator_connections: int = 32
    """Further connections, only for health, metrics, admin routes and the console."""
    lease_min_seconds: float = 1
    lease_max_seconds: float = 3600
    check_after_min_seconds: float = 0.5
    check_after_max_seconds: float = 86_400
    tags: int = 64
    """The most tags of a subscription."""
    attempts: int = 1000
    retry_min_seconds: float = 0.01
    retry_first_seconds: float = 86_400
    """The longest `retry_min`, the wait before the second attempt."""
    retry_max_seconds: float = 40 * 86_400


LIMITS = Limits()
SCHEDULED_BYTES = 64 << 10
"""The most bytes of the body of a schedule's message: servers hold all of them in memory."""
POSITION_CHARACTERS = 64 << 10
"""The most characters of a bridge's position as it is stored with each batch."""
BASE_CHARACTERS = 2 << 20
"""The most characters of a whole position: 140,000 intervals of GTIDs. The queue holds it in memory and in its
checkpoints, and a fourth of a request's bytes is left for it."""
_OF_SERVERS = ("connections", "operator_connections")


def bounds_of_clients() -> dict[str, float]:
    """The bounds of clients' requests, by name."""
    return {name: bound for name, bound in asdict(LIMITS).items() if name not in _OF_SERVERS}


@lru_cache(4096)  # a producer sends to few topics, and a group has one name
def _accept(text: str) -> None:
    """Raises ValueError for what is not a name, so that only names are cached."""
    if NAME.match(text) is None:
        raise ValueError


def check_name(kind: str, name: str) -> None:
    """Raises InvalidRequest (`invalid_name`) unless `name` is a valid name; `kind`: what it names, such as "topic"."""
    if not isinstance(name, str):
        raise InvalidRequest(f"{kind} is {name!r:.60}: it should be text", "invalid_name")
    try:
        if len(name) <= NAME_CHARACTERS:  # a longer text is neither hashed nor cached
            return _accept(name)
    except ValueError:
        pass
    raise InvalidRequest(
        f"{kind} {name[:60]!r} is not a name: 1 to 127 of A-Z a-z 0-9 . _ -, not beginning with . or -", "invalid_name"
    )


def digits(text: str, most: int = 19) -> int | None:
    """The number that 1 to `most` ASCII digits write; None for any other text.

    `isdigit` and `isdecimal` are also true for digits that `int` refuses or that nobody writes (², ٣), and `int` takes
    signs, spaces and underscores, and raises for more than 4,300 digits.
    """
    return int(text) if len(text) <= most and text.isascii() and text.isdigit() else None


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest (`out_of_bounds`) unless low <= value <= high."""
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"{name} is {value}; it must be from {low:,.15g} to {high:,.15g}", "out_of_bounds")


LAST_US = 253_402_300_799_999_999
"""The end of the year 9999: no page and no answer can show a later instant."""


def instant_us(name: str, moment: datetime) -> int:
    """An instant in microseconds since 1970, at least 0.

    Raises InvalidRequest (`out_of_bounds`) unless it names its time zone, and is before the year 10000 in UTC.
    """
    try:
        at_us = microseconds(moment)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", "out_of_bounds") from None
    if at_us > LAST_US:
        raise InvalidRequest(f"{name} is {moment.isoformat()}; it must be before the year 10000", "out_of_bounds")
    return max(0, at_us)


def check_whole(name: str, value: int, low: int, high: int) -> None:
    """Raises InvalidRequest (`out_of_bounds`) unless `value` is a whole number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number from {low} to {high}", "out_of_bounds")
    check_between(name, value, low, high)


def fair_header(fair_by: str) -> str | None:
    """The header that names the tenant; None for "key"."""
    return None if fair_by == "key" else fair_by.partition(":")[2]


def check_fair_by(fair_by: str, mode: str) -> None:
    """Raises InvalidRequest unless tenants can take turns by `fair_by` in this mode."""
    if not isinstance(fair_by, str) or re.fullmatch(FAIR_BY, fair_by) is None:
        raise InvalidRequest(f'fair_by is "key" or "header:NAME", not {fair_by!r:.60}', "invalid_schema")
    if fair_by and mode not in FAIR:
        raise InvalidRequest(
            f"fair_by needs mode {' or '.join(FAIR)}: in mode {mode} an instance gets the messages of a queue in their "
            "order",
            "invalid_schema",
        )


def check_text(what: str, text: str) -> None:
    """Raises InvalidRequest (`out_of_bounds`) if `text` has more than 255 characters."""
    if len(text) > 255:
        raise InvalidRequest(f"{what} has {len(text)} characters; at most 255 are allowed", "out_of_bounds")


def body_too_large(size: int, advice: str = "") -> TooLarge:
    """The error for a message's body of more than `message_bytes`. `advice`: what its sender may do instead."""
    return TooLarge(f"the body has {size} bytes; at most {LIMITS.message_bytes} are allowed{advice}")


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises TooLarge for headers beyond their bounds."""
    if len(headers) > LIMITS.headers:
        raise TooLarge(f"{len(headers)} headers; at most {LIMITS.headers} are allowed")
    if sum([len(k.encode()) + len(v.encode()) for k, v in headers.items()]) > LIMITS.headers_bytes:
        raise TooLarge(f"the headers have more than {LIMITS.headers_bytes} bytes in all")


def check_count(items: Sequence[object]) -> None:
    """Raises InvalidRequest for a request without items, or with too many."""
    if not 0 < len(items) <= LIMITS.items:
        raise InvalidRequest(f"a request carries 1 to {LIMITS.items} items, this one {len(items)}", "out_of_bounds")


def check_key(key: str) -> None:
    """Raises TooLarge for a key beyond its bound."""
    if len(key.encode()) > LIMITS.key_bytes:
        raise TooLarge(f"the key has more than {LIMITS.key_bytes} bytes")


def check_delay(delay: float | None, deliver_at: datetime | None, now_us: int) -> tuple[int, int]:
    """Delay and delivery time in microseconds, each 0 if it is not given. Raises InvalidRequest."""
    if delay is not None:
        if deliver_at is not None:
            raise InvalidRequest("give delay or deliver_at, not both", "invalid_delay")
        if not math.isfinite(delay):
            raise InvalidRequest("delay is not a number of seconds", "invalid_delay")
        check_between("delay", delay, 0, LIMITS.delay_seconds)
        return round(delay * 1_000_000), 0
    if deliver_at is None:
        return 0, 0
    try:
        at_us = microseconds(deliver_at)
    except ValueError as error:
        raise InvalidRequest(str(error), "invalid_delay") from None
    if at_us - now_us > LIMITS.delay_seconds * 1_000_000:
        raise InvalidRequest(f"deliver_at is more than {LIMITS.delay_seconds / 86_400:g} days ahead", "out_of_bounds")
    return 0, max(at_us, 0)


OLD_SLOT_TRANSACTIONS = 100_000_000
"""A slot that keeps rows of PostgreSQL's catalogue of this age is an alarm: it is half of the age
(autovacuum_freeze_max_age) at which PostgreSQL begins to clean up at any cost."""
