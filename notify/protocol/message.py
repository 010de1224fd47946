"""Message and ReceivedMessage: a message as a producer sends it, and as a consumer receives it."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import msgspec

from notify.errors import DeadLetter, InvalidRequest
from notify.protocol.wire import UNDECODABLE

T = TypeVar("T")

_MESSAGE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]{1,9}\Z")
CONTENT_TYPE = "content-type"
FIRST_ID = "notify-first-id"
"""The header with the first id of a message that is sent to a group again under a new id."""
UNFIT_CHARACTERS = 300
MOST_UNFIT = 5
"""The most places in a body that an error names where it does not fit its type."""
REPLAY = "notify-replay"
"""The header with the replay number of a redriven message, if that is not 0."""
EDITED = "notify-edited"
"""The header of a message that an operator corrected before it was sent again; it names the changed fields."""
SCHEDULE, SCHEDULED_FOR = "notify-schedule", "notify-scheduled-for"
"""The headers of a message that a schedule sends: the schedule's name, and the instant that the message is for."""
DEAD_LETTER_REASON = "notify-dead-letter-reason"
"""The header of a dead letter with the error that its handler raised."""


def schedule_of(headers: Mapping[str, str] | None) -> str:
    """The schedule that a message's headers name, and the instant that it is for; empty if they name none."""
    if not headers or SCHEDULE not in headers:
        return ""
    return f"{headers[SCHEDULE]} for {headers.get(SCHEDULED_FOR, 'an unknown instant')}"


@dataclass(slots=True)
class Message:
    """A message to send. `send` reads it once; later changes to it have no effect.

    `body`: bytes are sent unchanged, str as UTF-8 text, other values (including pydantic models and dataclasses) as
    JSON, in which NaN and infinity become null. The header `content-type` names the format. `key`: messages of one key
    keep their order; a callable is called just before the commit, when an autoincrement id is known
    (`key=lambda: order.id`). `tag`: subscriptions may filter by it. `delay`: seconds from the commit to the delivery;
    `deliver_at`: an instant with a time zone. `ttl`: seconds from when the message may be delivered; a group that
    reaches the message later skips it. `dedupe`: of the topic's messages with this key one is pending at a time, for
    `within` seconds; `keep`: the `first` one stays, or the `last` one replaces it, and waits its own `within`.
    """

    topic: str
    body: Any
    key: str | int | Callable[[], Any] | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float | None = None
    deliver_at: datetime | None = None
    ttl: float | None = None
    dedupe: str | int | None = None
    within: float | None = None
    keep: Literal["first", "last"] = "first"


def encode_body(message: Message) -> tuple[bytes, dict[str, str] | None]:
    """The encoded body and the headers of a message. Raises InvalidRequest for a body without a JSON form."""
    body = message.body
    headers = _headers(message.headers) if message.headers else None
    if type(body) is bytes:
        return body, headers
    if isinstance(body, (bytes, bytearray, memoryview)):
        return memoryview(body).tobytes(), headers
    headers = headers or {}
    if isinstance(body, str):
        headers.setdefault(CONTENT_TYPE, "text/plain; charset=utf-8")
        return utf8("body", body), headers
    try:
        # A pydantic model encodes itself; msgspec encodes dataclasses and its own structs.
        write = getattr(body, "model_dump_json", None)
        if write is not None and (state := getattr(body, "_sa_instance_state", None)) is not None:
            # A row of SQLModel writes only what is loaded, so that after a commit it would be empty.
            for name in state.expired_attributes.intersection(type(body).model_fields):
                getattr(body, name)
        data = write().encode() if write is not None else msgspec.json.encode(_with_defaults(body))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"the body is neither bytes, text nor a JSON value: {error}", "invalid_body") from None
    headers.setdefault(CONTENT_TYPE, "application/json")
    return data, headers


def _with_defaults(value: Any) -> Any:
    """The value, with a dict in place of a dataclass of which a field is only in its class, such as
    `field(default="order.placed", init=False)`: msgspec leaves such fields out."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, dict):
        if _SCALARS.issuperset(map(type, value.values())):
            return value
        values = {key: _with_defaults(each) for key, each in value.items()}
        return value if all(map(operator.is_, values.values(), value.values())) else values
    if isinstance(value, list | tuple | set | frozenset):
        if _SCALARS.issuperset(map(type, value)):
            return value
        items = [_with_defaults(each) for each in value]
        return value if all(map(operator.is_, items, value)) else items
    if not hasattr(kind, "__dataclass_fields__"):
        return value
    names = [each.name for each in dataclasses.fields(value)]
    fields = {name: _with_defaults(getattr(value, name)) for name in names if hasattr(value, name)}
    own = getattr(value, "__dict__", fields)
    return value if all(name in own and own[name] is each for name, each in fields.items()) else fields


_SCALARS = frozenset((str, int, float, bool, type(None), bytes))


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


def as_text(name: str, value: object) -> str:
    """The value as an exact str, even if it is an enum member or of another subclass of str. Raises InvalidRequest."""
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is text, not {type(value).__name__}: {value!r:.60}", "invalid_type")
    return str.__str__(value)


def utf8(name: str, value: str) -> bytes:
    """The text as UTF-8. Raises InvalidRequest for half of a surrogate pair."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not Unicode text: {error}", "invalid_text") from None


def number_of_seconds(name: str, value: object) -> float:
    """The value as seconds. Raises InvalidRequest unless it is a number; a timedelta or bool does not count as one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = "; write its .total_seconds()" if isinstance(value, timedelta) else ""
        raise InvalidRequest(f"{name} is a number of seconds, not {type(value).__name__}{hint}", "invalid_type")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequest(f"{name} is too large a number of seconds", "out_of_bounds") from None


def resolve_key(message: Message) -> str | None:
    """The key as text, or None; a callable is called. Raises InvalidRequest if it returns None, or if the key is bytes
    or not Unicode text."""
    key = message.key
    if callable(key):
        key = key()
        if key is None:
            raise InvalidRequest(
                f"the key of a message to {message.topic!r} is None even after the flush: add its row to this session",
                "invalid_key",
            )
    if not isinstance(key, str | int):
        _refuse_key_without_text(message.topic, key)
    return None if key is None else as_text("a key", key if isinstance(key, str) else str(key))


def _refuse_key_without_text(topic: str, key: object) -> None:
    """Raises InvalidRequest for a key whose str() is Python's notation, or contains an address in memory, which differs
    between processes: such keys would not keep an order."""
    kind = type(key)
    if isinstance(key, bytes | bytearray | memoryview):
        raise InvalidRequest(f"a key must be text or a number, not {kind.__name__}: decode it", "invalid_type")
    if inspect.iscoroutine(key):
        key.close()
    is_bare = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    if is_bare or inspect.isawaitable(key) or callable(key):
        raise InvalidRequest(
            f"the key of a message to {topic!r} is a {kind.__name__}: give text, a number, or a plain function that "
            "returns one",
            "invalid_type",
        )


class NoJson(DeadLetter, msgspec.DecodeError):
    """A body is not JSON. If the handler does not catch this, its message becomes a dead letter immediately, because
    another attempt would get the same bytes."""


class NoText(DeadLetter, UnicodeDecodeError):
    """A body is not UTF-8 text; otherwise like NoJson."""

    def __init__(self, error: UnicodeDecodeError) -> None:
        UnicodeDecodeError.__init__(self, *error.args)

    def __str__(self) -> str:
        return f"the body is not text: {UnicodeDecodeError.__str__(self)}"


@dataclass(slots=True, frozen=True)
class ReceivedMessage:
    """A message as a handler receives it. `attempt` counts from 1; `committed_at` is RFC 3339 in UTC.

    `replay` is 0, or the number of the reset or redrive that repeats effects; it is a part of an inbox row's key.
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
        """The id of the message before it was redriven; the message's id if it never was."""
        first_id = self.headers.get(FIRST_ID, "")
        return first_id if _MESSAGE_ID.match(first_id) else self.id

    @property
    def text(self) -> str:
        """The body as UTF-8 text. Raises a DeadLetter that is also a UnicodeDecodeError."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise NoText(error) from None

    def json(self) -> Any:
        """The body as a JSON value. Raises a DeadLetter that is also a msgspec.DecodeError."""
        try:
            return msgspec.json.decode(self.body)
        except UNDECODABLE as error:
            raise NoJson(f"the body is not JSON: {error}") from None

    def decode(self, kind: type[T]) -> T:
        """The JSON body as a pydantic model, a dataclass, a msgspec struct or any other type that msgspec decodes.

        Raises DeadLetter if the body does not fit the type, because another attempt would not help.
        """
        read = getattr(kind, "model_validate_json", None)
        try:
            value: T = read(self.body) if read is not None else msgspec.json.decode(self.body, type=kind)
        except (ValueError, *UNDECODABLE) as error:
            raise DeadLetter(f"the body does not fit {kind.__name__}: {why_unfit(error)}") from None
        return value


class _Unfrozen:
    """The fields of a ReceivedMessage. A frozen dataclass sets each field by a call, which takes four times as long as
    all else that makes a message for its handler; so this is filled, and becomes a ReceivedMessage."""

    __slots__ = ReceivedMessage.__slots__


_new = object.__new__


def received(
    id: str, topic: str, queue: int, offset: int, body: bytes, key: str | None, tag: str | None,
    headers: Mapping[str, str], attempt: int, committed_at: str, replay: int,
) -> ReceivedMessage:  # fmt: skip
    """A ReceivedMessage, made quickly."""
    message: Any = _new(_Unfrozen)
    message.id = id
    message.topic = topic
    message.queue = queue
    message.offset = offset
    message.body = body
    message.key = key
    message.tag = tag
    message.headers = headers
    message.attempt = attempt
    message.committed_at = committed_at
    message.replay = replay
    message.__class__ = ReceivedMessage
    return message  # type: ignore[no-any-return]


def why_unfit(error: Exception) -> str:
    """A decoder's error about a body, in one line.

    Pydantic's own text quotes values of the body, which do not belong in logs and in the reasons of dead letters.
    """
    pydantic = sys.modules.get("pydantic_core")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        return " ".join(str(error).split())[:UNFIT_CHARACTERS]
    details = error.errors(include_url=False, include_context=False, include_input=False)[:MOST_UNFIT]
    texts = [
        ": ".join([*(".".join(map(str, detail["loc"])) for _ in detail["loc"][:1]), detail["msg"]])
        for detail in details
    ]
    return " ".join("; ".join(texts).split())[:UNFIT_CHARACTERS]


_BYTES = 8


def body_digest(body: bytes) -> int:
    """The 64-bit BLAKE2b digest of an encoded body, as a signed number for a BIGINT column."""
    return int.from_bytes(blake2b(body, digest_size=_BYTES).digest(), "big", signed=True)
