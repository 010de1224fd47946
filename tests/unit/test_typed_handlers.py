"""Typed handlers: which annotations decode a body, which leave the message as it is, and which are refused."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest
import typing_extensions

from notify.client import Message, ReceivedMessage
from notify.client.handling.handlers import check_callable
from notify.errors import DeadLetter, InvalidRequest

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

    import notify.client as sdk


@dataclasses.dataclass
class Placed:
    item: str
    price: int


class PlacedStruct(msgspec.Struct):
    item: str
    price: int


class PlacedDict(typing.TypedDict):
    item: str
    price: int


class ExtendedDict(typing_extensions.TypedDict):
    item: str
    price: int


class PlacedModel(pydantic.BaseModel):
    item: str
    price: int


@pydantic.dataclasses.dataclass
class PlacedValid:
    item: str
    price: int


class Bought(msgspec.Struct, tag="bought"):
    item: str


class Sold(msgspec.Struct, tag="sold"):
    item: str


class Money:
    """A type that no JSON value is."""


@dataclasses.dataclass
class Priced:
    prices: dict[str, list[Money | None]]


class PricedStruct(msgspec.Struct):
    placed: PlacedModel


class Named(typing.Protocol):
    id: str


def untyped(message): ...  # type: ignore[no-untyped-def]
def as_it_is(message: ReceivedMessage) -> None: ...
def of_anything(message: Any) -> None: ...
def of_an_object(message: object) -> None: ...
def of_a_protocol(message: Named) -> None: ...
def of_a_module(message: sdk.ReceivedMessage) -> None: ...
def of_all(*messages: Placed) -> None: ...
def of_a_dataclass(placed: Placed) -> None: ...
def of_a_struct(placed: PlacedStruct) -> None: ...
def of_a_dict(placed: PlacedDict) -> None: ...
def of_a_model(placed: PlacedModel) -> None: ...
def of_a_valid_one(placed: PlacedValid) -> None: ...
def of_two(event: Bought | Sold) -> None: ...
def of_ids(number: int) -> None: ...
def of_bytes(body: bytes) -> None: ...
def of_a_list(placed: list[Placed]) -> None: ...
def of_messages(messages: list[ReceivedMessage]) -> None: ...
def of_a_sequence(placed: Sequence[PlacedModel]) -> None: ...
def of_any_list(messages: list) -> None: ...  # type: ignore[type-arg]
def of_senders(message: Message) -> None: ...
def of_the_unknown(message: Unknown) -> None: ...
def of_both(placed: Placed | PlacedStruct) -> None: ...
def of_money(priced: Priced) -> None: ...
def of_a_model_within(priced: PricedStruct) -> None: ...
def of_nothing(nothing: None) -> None: ...
def of_another_placed(placed: sdk.Placed) -> None: ...  # type: ignore[name-defined]
def of_an_extended_dict(placed: ExtendedDict) -> None: ...


class Shop:
    def __call__(self, placed: Placed) -> None: ...

    def on_placed(self, placed: Placed) -> None: ...


def message(body: bytes) -> ReceivedMessage:
    return ReceivedMessage("id", "t", 0, 0, body, None, None, {}, 1, "")


def read_by(function: Callable[..., Any], *, in_batches: bool = False) -> Callable[[ReceivedMessage], Any] | None:
    return check_callable(function, is_async=False, has_session=False, in_batches=in_batches)


GOOD, BAD, BROKEN = b'{"item": "book", "price": 5}', b'{"item": "book", "price": "much"}', b"\xff{"


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (of_a_dataclass, Placed("book", 5)),
        (of_a_struct, PlacedStruct("book", 5)),
        (of_a_dict, {"item": "book", "price": 5}),
        (of_a_model, PlacedModel(item="book", price=5)),
        (of_a_valid_one, PlacedValid(item="book", price=5)),
        (Shop(), Placed("book", 5)),
        (Shop().on_placed, Placed("book", 5)),
        (functools.partial(of_a_dataclass), Placed("book", 5)),
    ],
)
def test_a_body_is_decoded_into_the_type_or_is_a_dead_letter(function: Callable[..., Any], value: Any) -> None:
    read = read_by(function)
    assert read is not None and read(message(GOOD)) == value
    for body in (BAD, BROKEN, b""):
        with pytest.raises(DeadLetter, match="the body does not fit Placed"):
            read(message(body))


def test_a_union_of_tagged_structs() -> None:
    read = read_by(of_two)
    assert read is not None and read(message(b'{"type": "sold", "item": "book"}')) == Sold("book")


@pytest.mark.parametrize(
    "function", [untyped, as_it_is, of_anything, of_an_object, of_a_protocol, of_a_module, of_all, print, [].append]
)
def test_a_handler_without_a_body_type_gets_the_message(function: Callable[..., Any]) -> None:
    assert read_by(function) is None


@pytest.mark.parametrize("function", [untyped, of_anything, of_an_object, of_any_list, of_messages, [].append])
def test_a_list_without_a_type_gets_the_messages_themselves(function: Callable[..., Any]) -> None:
    assert read_by(function, in_batches=True) is None


@pytest.mark.parametrize(("function", "kind"), [(of_a_list, Placed), (of_a_sequence, PlacedModel)])
def test_a_list_of_a_type_gets_decoded_bodies(function: Callable[..., Any], kind: type) -> None:
    read = read_by(function, in_batches=True)
    assert read is not None and isinstance(read(message(GOOD)), kind)


@pytest.mark.parametrize(
    ("function", "in_batches", "said"),
    [
        (of_ids, False, "annotate its first parameter with ReceivedMessage, a dataclass"),
        (of_bytes, False, "annotate its first parameter with ReceivedMessage, a dataclass"),
        (of_a_list, False, r"write subscribe\(topic, batch=500\)"),
        (of_messages, False, r"write subscribe\(topic, batch=500\)"),
        (of_a_dataclass, True, r"annotate list\[Placed\], or leave batch= out"),
        (as_it_is, True, r"annotate list\[ReceivedMessage\], or leave batch= out"),
        (of_senders, False, "annotate ReceivedMessage"),
        (of_the_unknown, False, "define the type at the module's level"),
        (of_both, False, "no body can be decoded"),
        (of_money, False, "no JSON value is a Money"),
        (of_a_model_within, False, "no JSON value is a PlacedModel"),
        (of_nothing, False, "annotate its first parameter with ReceivedMessage, a dataclass"),
        (of_another_placed, False, "define the type at the module's level"),
    ],
)
def test_an_annotation_that_cannot_be_is_refused(function: Callable[..., Any], in_batches: bool, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_by(function, in_batches=in_batches)
    assert refused.value.code == "invalid_handler" and function.__name__ in str(refused.value)


def annotated(annotation: object) -> Callable[..., Any]:
    """A function of a module without `from __future__ import annotations`."""

    def handle(first: Any) -> None: ...

    handle.__annotations__ = {"first": annotation}
    return handle


@pytest.mark.parametrize(
    ("annotation", "in_batches"),
    [
        (list["Placed"], True),
        (Sequence["Placed"], True),
        (typing.Optional["Placed"], False),
        (typing.Annotated[Placed, "what was placed"], False),
        (list[typing.Annotated[Placed, "what was placed"]], True),
    ],
)
def test_a_type_that_is_named_within_an_annotation(annotation: object, in_batches: bool) -> None:
    read = read_by(annotated(annotation), in_batches=in_batches)
    assert read is not None and read(message(GOOD)) == Placed("book", 5)


def test_a_message_that_is_named_within_an_annotation() -> None:
    assert read_by(annotated(list["ReceivedMessage"]), in_batches=True) is None
    assert read_by(annotated(typing.Annotated[ReceivedMessage, "as it is"])) is None


def test_a_typed_dict_of_typing_extensions() -> None:
    read = read_by(of_an_extended_dict)
    assert read is not None and read(message(GOOD)) == {"item": "book", "price": 5}
    with pytest.raises(DeadLetter, match="the body does not fit ExtendedDict"):
        read(message(BAD))


@pytest.mark.parametrize("function", [of_a_model, of_a_valid_one, of_a_dataclass, of_a_struct])
def test_the_reason_says_where_a_body_does_not_fit_and_quotes_none_of_it(function: Callable[..., Any]) -> None:
    """Reasons go to the server, into its console and into logs."""
    read = read_by(function)
    body = b'{"item": "book", "price": "card 4111"}'
    assert read is not None
    with pytest.raises(DeadLetter, match="price") as dead:
        read(message(body))
    assert "4111" not in str(dead.value) and "http" not in str(dead.value)
    with pytest.raises(DeadLetter, match="price") as dead:
        message(body).decode(PlacedModel)
    assert "4111" not in str(dead.value)
