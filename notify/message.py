"""The message as producers write it and consumers read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from notify.errors import DeadLetter, InvalidRequest

T = TypeVar("T")

_MESSAGE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]{1,9}\Z")
CONTENT_TYPE = "content-type"
FIRST_ID = "notify-first-id"
"""The header of a message that is sent to a group again under another id: the id that it had at first."""
REPLAY = "notify-replay"
"""The header of a message that was dead: the replay that it belongs to, where that is not 0."""


@dataclass(slots=True)
class Message:
    """A message to send. It is read once, by `send`: what is changed in it afterwards changes nothing.

    `body`: bytes as they are, str as UTF-8 text, anything else (pydantic models and dataclasses, too) as JSON; the
    `content-type` header says which.
    `key`: messages of one key keep their order; a callable is asked just before the commit, when an autoincrement id
    is known (`key=lambda: order.id`). `tag`: what subscriptions filter by. `delay`: seconds from the commit;
    `deliver_at`: an instant with its time zone. `ttl`: seconds from when it may be delivered; a group that gets to it
    later passes over it.
    """

    topic: str
    body: Any
    key: str | int | Callable[[], Any] | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float | None = None
    deliver_at: datetime | None = None
    ttl: float | None = None


def encode_body(message: Message) -> tuple[bytes, dict[str, str] | None]:
    """Body bytes and headers of a message. Raises InvalidRequest if the body is no JSON value, or a header no text."""
    body = message.body
    headers = _headers(message.headers) if message.headers else None
    if isinstance(body, bytes):
        return body, headers
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body), headers
    headers = headers or {}
    if isinstance(body, str):
        headers.setdefault(CONTENT_TYPE, "text/plain; charset=utf-8")
        return utf8("body", body), headers
    try:
        # A pydantic model writes itself; dataclasses and msgspec's structs are written as JSON objects.
        write = getattr(body, "model_dump_json", None)
        data = write().encode() if write is not None else msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the body is neither bytes, text nor a JSON value: {error}", "invalid_body") from None
    headers.setdefault(CONTENT_TYPE, "application/json")
    return data, headers


def _headers(given: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"headers are a mapping of text to text, not {type(given).__name__}", "invalid_headers")
    headers: dict[str, str] = {}
    for name, value in given.items():
        plain = as_text("a header's name", name)
        utf8("a header's name", plain)
        headers[plain] = as_text(f"header {plain[:60]!r}", value)
        utf8(f"header {plain[:60]!r}", headers[plain])
    return headers


def as_text(what: str, value: object) -> str:
    """Text as an exact str: members of enums and other kinds of str as the text they hold. Raises InvalidRequest."""
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{what} is text, not {type(value).__name__}: {value!r:.60}", "invalid_type")
    return str.__str__(value)


def utf8(what: str, value: str) -> bytes:
    """The text's bytes. Raises InvalidRequest for half of a surrogate pair, which is no Unicode."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is no Unicode text: {error}", "invalid_text") from None


def number_of_seconds(what: str, value: object) -> float:
    """A number of seconds. Raises InvalidRequest for anything else, a timedelta and a bool included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "; write its .total_seconds()" if isinstance(value, timedelta) else ""
        raise InvalidRequest(f"{what} is a number of seconds, not {type(value).__name__}{hint}", "invalid_type")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(f"{what} is too large a number of seconds", "out_of_bounds") from None


def resolve_key(message: Message) -> str | None:
    """The key as text; asks a callable. Raises InvalidRequest if that gives nothing, bytes, or no Unicode text."""
    key = message.key
    if callable(key):
        key = key()
        if key is None:
            raise InvalidRequest(
                f"the key of a message to {message.topic!r} is None even after the flush; is its row in this session?",
                "invalid_key",
            )
    if isinstance(key, bytes | bytearray | memoryview):  # their `str` is how Python shows them
        raise InvalidRequest(f"a key is text or a number, not {type(key).__name__}: decode it", "invalid_type")
    return None if key is None else as_text("a key", key if isinstance(key, str) else str(key))


@dataclass(slots=True, frozen=True)
class ReceivedMessage:
    """A message as a handler gets it. `attempt` counts from 1; `committed_at` is RFC 3339 in UTC.

    `replay` is 0, or the number of a reset or redrive that was to repeat effects: an inbox keeps the runs apart.
    """

    id: str
    topic: str
    queue: int
    offset: int
    body: bytes
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    attempt: int
    committed_at: str
    replay: int = 0

    @property
    def first_id(self) -> str:
        """The id that the message had before it was dead and sent again; its own if it never was."""
        named = self.headers.get(FIRST_ID, "")
        return named if _MESSAGE_ID.match(named) else self.id

    @property
    def text(self) -> str:
        """The body as UTF-8 text. Raises UnicodeDecodeError."""
        return self.body.decode()

    def json(self) -> Any:
        """The body as a JSON value. Raises msgspec.DecodeError."""
        return msgspec.json.decode(self.body)

    def decode(self, kind: type[T]) -> T:
        """The body as a pydantic model, a dataclass, a msgspec struct or what else its JSON fits.

        Raises DeadLetter for a body that does not fit: trying again would not help.
        """
        read = getattr(kind, "model_validate_json", None)
        try:
            found: T = read(self.body) if read is not None else msgspec.json.decode(self.body, type=kind)
        except (ValueError, msgspec.DecodeError) as error:
            raise DeadLetter(f"the body is no {kind.__name__}: {str(error)[:300]}") from None
        return found
