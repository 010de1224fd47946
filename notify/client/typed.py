"""Typed handlers: the annotation of a handler's first parameter says which values the bodies are decoded into."""

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
from notify.message import Message, ReceivedMessage, why_unfit

Read = Callable[[ReceivedMessage], Any]
"""Gives a message's value. Raises DeadLetter where the body does not fit."""
MOST_WRAPPINGS = 100
_NONE_GIVEN = inspect.Parameter.empty
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_KNOWN: dict[str, Any] = {
    "ReceivedMessage": ReceivedMessage,
    "Any": Any,
    "Sequence": typing.Sequence,
    "Iterable": typing.Iterable,
}
"""Names that a module may import for its type checker alone."""
_TAKEN = "ReceivedMessage, a dataclass, a msgspec struct, a TypedDict or a pydantic model"


def reader_of(function: Callable[..., Any], name: str, *, in_batches: bool) -> Read | None:
    """The decoder of a handler's messages; None where it takes them as they are, or says nothing of it.

    `name` is the handler's, for errors. `in_batches`: it is called with lists. Raises InvalidRequest
    (`invalid_handler`) for an annotation that cannot be.
    """
    kind = _first_annotation(function, name)
    if in_batches:
        kind = _element_of(kind, name)
    elif (typing.get_origin(kind) or kind) in _LISTS:
        raise _refusal(name, f"takes {_said(kind)}: write subscribe(topic, batch=500), which calls it with lists")
    return None if _is_the_message(kind) else _reader(kind, name)


# --- the annotation -----------------------------------------------------------------------------------------------


def _first_annotation(function: Callable[..., Any], name: str) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C do not say what they take
        return _NONE_GIVEN
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return _NONE_GIVEN
    annotation = parameters[0].annotation
    return annotation if annotation is _NONE_GIVEN else _resolved(annotation, function, name)


def _resolved(annotation: Any, function: Callable[..., Any], name: str) -> Any:
    """The type that an annotation names, of which quotes or `from __future__ import annotations` leave a text."""
    try:
        return _evaluated(annotation, _KNOWN | _globals_of(function))
    except Exception as error:
        failed = error
    if isinstance(annotation, str):
        # A module, too, may be imported for a type checker alone. Its names may be those of other types here.
        with contextlib.suppress(Exception):
            return _evaluated(re.sub(r"\b(?:\w+\.)+", "", annotation), dict(_KNOWN))
    raise _refusal(
        name,
        f"is annotated with {annotation!r}, which cannot be found in its module ({failed}): define the type at the "
        "module's level and import it outside `if TYPE_CHECKING`, or annotate ReceivedMessage",
    )


def _evaluated(annotation: Any, known: dict[str, Any]) -> Any:
    holder = type("Holder", (), {"__annotations__": {"first": annotation}})
    return typing.get_type_hints(holder, known, {})["first"]  # without the extras of Annotated


def _globals_of(function: Any) -> dict[str, Any]:
    """The names that a function's module knows, also behind partials, decorators and the `__call__` of an object."""
    for _ in range(MOST_WRAPPINGS):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not hasattr(function, "__globals__"):
            function = getattr(type(function), "__call__", None)  # noqa: B004
        else:
            break
    known: dict[str, Any] = getattr(function, "__globals__", {})
    return known


def _element_of(kind: Any, name: str) -> Any:
    """The type of a list's elements."""
    if kind in (_NONE_GIVEN, Any, object) or kind in _LISTS:
        return Any
    if typing.get_origin(kind) in _LISTS:
        return typing.get_args(kind)[0]
    raise _refusal(
        name,
        f"takes {_said(kind)}, and with batch= it is called with a list: annotate list[{_said(kind)}], or leave batch= "
        "out",
    )


def _is_the_message(kind: Any) -> bool:
    """Whether a message fits the annotation as it is."""
    return any(
        one in (_NONE_GIVEN, Any, *ReceivedMessage.__mro__)
        or isinstance(one, typing.TypeVar)
        or getattr(one, "_is_protocol", False)
        for one in _members(kind)
    )


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


# --- decoding -----------------------------------------------------------------------------------------------------


def _reader(kind: Any, name: str) -> Read:
    if kind is Message:
        raise _refusal(name, "takes Message, which producers send: annotate ReceivedMessage")
    read = getattr(kind, "model_validate_json", None)
    if read is None and hasattr(kind, "__pydantic_validator__"):  # a dataclass of pydantic
        from pydantic import TypeAdapter

        read = TypeAdapter(kind).validate_json
    if read is None and kind is not types.NoneType and all(_is_data(one) for one in _members(kind)):
        try:
            read, foreign = msgspec.json.Decoder(kind).decode, _foreign(msgspec.inspect.type_info(kind), set())
        except Exception as error:
            raise _refusal(name, f"takes {_said(kind)}, into which no body can be decoded: {error}") from None
        if foreign is not None:
            raise _refusal(
                name,
                f"takes {_said(kind)}, into which no body can be decoded: no JSON value is a {_said(foreign)}; take "
                "ReceivedMessage and decode it yourself, or make the type a pydantic model",
            )
    if read is None:
        raise _refusal(name, f"takes {_said(kind)}: annotate its first parameter with {_TAKEN}")
    return functools.partial(_read, read, _said(kind))


def _is_data(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind  # a generic struct
    if not isinstance(kind, type):
        return False
    # The TypedDict of typing_extensions is another than Python's, with the same attributes.
    is_typed_dict = issubclass(kind, dict) and hasattr(kind, "__required_keys__")
    return dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct | types.NoneType) or is_typed_dict


def _foreign(part: Any, seen: set[int]) -> Any:
    """A type within a type's description that msgspec knows nothing of: its decoder refuses whatever value is there.

    `seen`: the ids of descriptions, which may hold themselves. None where there is no such type.
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
    return next((found for one in parts if (found := _foreign(one, seen)) is not None), None)


def _read(decode: Callable[[bytes], Any], said: str, message: ReceivedMessage) -> Any:
    try:
        return decode(message.body)
    except (ValueError, TypeError, msgspec.DecodeError, RecursionError) as error:
        # Another attempt would find the same bytes.
        raise DeadLetter(f"the body does not fit {said}: {why_unfit(error)}") from None


def _said(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _refusal(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the handler {name} {why}", "invalid_handler")
