"""Typed handlers: bodies are decoded into the type that the annotation of a handler's first parameter names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any

import msgspec
import msgspec.inspect

from notify.errors import DeadLetter, InvalidRequest
from notify.protocol.message import Message, ReceivedMessage, why_unfit
from notify.protocol.wire import UNDECODABLE

Read = Callable[[ReceivedMessage], Any]
"""Decodes a message's body. Raises DeadLetter if the body does not fit the type."""
MOST_WRAPPINGS = 100
_NONE_GIVEN = inspect.Parameter.empty
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_KNOWN: dict[str, Any] = {
    "ReceivedMessage": ReceivedMessage,
    "Any": Any,
    "Sequence": typing.Sequence,
    "Iterable": typing.Iterable,
}
"""Names that a module may import only for its type checker."""
_TAKEN = "ReceivedMessage, a dataclass, a msgspec struct, a TypedDict or a pydantic model"


def reader_of(function: Callable[..., Any], name: str, *, in_batches: bool) -> Read | None:
    """The decoder of a handler's messages; None if it takes ReceivedMessages, or has no annotation.

    `name`: the handler's name, for errors. `in_batches`: whether the handler is called with lists. Raises
    InvalidRequest (`invalid_handler`) for an annotation that no body can be decoded into.
    """
    kind = _first_annotation(function, name)
    if in_batches:
        kind = _element_of(kind, name)
    elif (typing.get_origin(kind) or kind) in _LISTS:
        raise _refusal(
            name, f"takes {_name_of_type(kind)}: write subscribe(topic, batch=500), which calls it with lists"
        )
    return None if _is_the_message(kind) else _reader(kind, name)


# --- the annotation -----------------------------------------------------------------------------------------------


def _first_annotation(function: Callable[..., Any], name: str) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C have no signature
        return _NONE_GIVEN
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return _NONE_GIVEN
    annotation = parameters[0].annotation
    return annotation if annotation is _NONE_GIVEN else _resolved(annotation, function, name)


def _resolved(annotation: Any, function: Callable[..., Any], name: str) -> Any:
    """The type that an annotation names; quotes or `from __future__ import annotations` make the annotation a text."""
    try:
        return _evaluated(annotation, _KNOWN | _globals_of(function))
    except Exception as error:
        failed = error
    if isinstance(annotation, str):
        # A module may be imported only for the type checker: try again without the names of modules.
        with contextlib.suppress(Exception):
            return _evaluated(re.sub(r"\b(?:\w+\.)+", "", annotation), dict(_KNOWN))
    raise _refusal(
        name,
        f"is annotated with {annotation!r}, which cannot be found in its module ({failed}): define the type at the "
        "module's level and import it outside `if TYPE_CHECKING`, or annotate ReceivedMessage",
    )


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    holder = type("Holder", (), {"__annotations__": {"first": annotation}})
    return typing.get_type_hints(holder, names, {})["first"]  # without the extras of Annotated


def _globals_of(function: Any) -> dict[str, Any]:
    """The global names of a function's module, looked up through partials, decorators and the `__call__` of objects."""
    for _ in range(MOST_WRAPPINGS):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not hasattr(function, "__globals__"):
            function = getattr(type(function), "__call__", None)  # noqa: B004
        else:
            break
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return names


def _element_of(kind: Any, name: str) -> Any:
    """The type of the elements of the list that a handler of batches takes."""
    if kind in (_NONE_GIVEN, Any, object) or kind in _LISTS:
        return Any
    if typing.get_origin(kind) in _LISTS:
        return typing.get_args(kind)[0]
    raise _refusal(
        name,
        f"takes {_name_of_type(kind)}, and with batch= it is called with a list: annotate "
        f"list[{_name_of_type(kind)}], or leave batch= out",
    )


def _is_the_message(kind: Any) -> bool:
    """Whether the annotation takes a ReceivedMessage itself."""
    return any(
        member in (_NONE_GIVEN, Any, *ReceivedMessage.__mro__)
        or isinstance(member, typing.TypeVar)
        or getattr(member, "_is_protocol", False)
        for member in _members(kind)
    )


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; any other type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


# --- decoding -----------------------------------------------------------------------------------------------------


def _reader(kind: Any, name: str) -> Read:
    if kind is Message:
        raise _refusal(name, "takes Message, which producers send: annotate ReceivedMessage")
    read = getattr(kind, "model_validate_json", None)
    if read is None and hasattr(kind, "__pydantic_validator__"):  # a pydantic dataclass
        from pydantic import TypeAdapter

        read = TypeAdapter(kind).validate_json
    if read is None and kind is not types.NoneType and all(_is_data(member) for member in _members(kind)):
        try:
            read, foreign = msgspec.json.Decoder(kind).decode, _foreign(msgspec.inspect.type_info(kind), set())
        except Exception as error:
            raise _refusal(name, f"takes {_name_of_type(kind)}, into which no body can be decoded: {error}") from None
        if foreign is not None:
            raise _refusal(
                name,
                f"takes {_name_of_type(kind)}, into which no body can be decoded: no JSON value is a "
                f"{_name_of_type(foreign)}; take ReceivedMessage and decode it yourself, or make the type a pydantic "
                "model",
            )
    if read is None:
        raise _refusal(name, f"takes {_name_of_type(kind)}: annotate its first parameter with {_TAKEN}")
    return functools.partial(_read, read, _name_of_type(kind))


def _is_data(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind  # a generic struct
    if not isinstance(kind, type):
        return False
    # The TypedDict of typing_extensions is a different class than Python's, with the same attributes.
    is_typed_dict = issubclass(kind, dict) and hasattr(kind, "__required_keys__")
    return dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct | types.NoneType) or is_typed_dict


def _foreign(part: Any, seen: set[int]) -> Any:
    """The first type in a type's description that msgspec does not know, so that its decoder refuses every value; None
    if there is no such type.

    `seen`: the ids of descriptions, which may contain themselves.
    """
    if isinstance(part, msgspec.inspect.CustomType):
        return part.cls
    if id(part) in seen:
        return None
    seen.add(id(part))
    if isinstance(part, tuple):
        parts: list[Any] = list(part)
    elif isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
        parts = [getattr(part, name, None) for name in part.__struct_fields__]
    else:
        return None
    return next((foreign for inner in parts if (foreign := _foreign(inner, seen)) is not None), None)


def _read(decode: Callable[[bytes], Any], type_name: str, message: ReceivedMessage) -> Any:
    try:
        return decode(message.body)
    except (ValueError, TypeError, *UNDECODABLE) as error:
        # Another attempt would get the same bytes.
        raise DeadLetter(f"the body does not fit {type_name}: {why_unfit(error)}") from None


def _name_of_type(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _refusal(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the handler {name} {why}", "invalid_handler")


class Decoded:
    """A message, and its decoded body until the first call takes it."""

    __slots__ = ("message", "value")

    def __init__(self, message: ReceivedMessage, value: Any) -> None:
        self.message = message
        self.value = value

    def take_value(self, read: Read) -> Any:
        """The decoded body, decoded again for each further call, because a failed handler may have changed it."""
        value, self.value = self.value, None
        return read(self.message) if value is None else value


def calling(call: Callable[..., Any], read: Read, decoded: abc.Sequence[Decoded]) -> Callable[..., Any]:
    """A handler of decoded batches as a function of messages, of which an inbox may leave out some."""
    return functools.partial(_call_with_values, call, read, {id(d.message): d for d in decoded})


def _call_with_values(
    call: Callable[..., Any],
    read: Read,
    decoded: abc.Mapping[int, Decoded],
    messages: abc.Sequence[ReceivedMessage],
    *session: Any,
) -> Any:
    return call([decoded[id(message)].take_value(read) for message in messages], *session)
