"""A producer checks and encodes each message in the call that gives it: a malformed one fails no other."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, ClassVar

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import DetachedInstanceError

from notify.client.producer.packing import pack
from notify.client.producer.transactions import TransactionClient
from notify.errors import InvalidRequest, NotifyError, TooLarge
from notify.protocol.message import Message, resolve_key
from notify.protocol.wire import Item, PackedMessage, encode_msgpack
from notify.testing import InMemoryServer

SURROGATE = "\ud800"
WRONG: dict[str, dict[str, Any]] = {
    "a header that is no text": {"headers": {"n": 1}},
    "a header's name that is no text": {"headers": {1: "n"}},
    "a header's value that is no Unicode": {"headers": {"h": SURROGATE}},
    "headers that are no mapping": {"headers": ["h"]},
    "too many headers": {"headers": {str(n): "" for n in range(33)}},
    "headers that are too large": {"headers": {"h": "x" * 8192}},
    "a tag that is no text": {"tag": 5},
    "a tag that is no name": {"tag": "a b"},
    "a tag that is no Unicode": {"tag": SURROGATE},
    "a key that is no Unicode": {"key": SURROGATE},
    "a key that is too long": {"key": "k" * 1025},
    "a delay that is no number": {"delay": timedelta(seconds=5)},
    "a delay that is true": {"delay": True},
    "a delay of another kind of number": {"delay": Decimal(5)},
    "a delay that is no number of seconds": {"delay": float("nan")},
    "a delay below 0": {"delay": -1},
    "a delay that is too long": {"delay": 41 * 86_400},
    "an endless delay": {"delay": 10**400},
    "a delay and an instant": {"delay": 1, "deliver_at": datetime.now(UTC)},
    "an instant that names no zone": {"deliver_at": datetime.now()},
    "an instant that is none": {"deliver_at": 5},
    "an instant before the year 1": {"deliver_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))},
    "an instant behind the year 9999": {"deliver_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))},
    "a time to live that is none": {"ttl": timedelta(seconds=5)},
    "a time to live that is too short": {"ttl": 0.01},
    "a topic that is no name": {"topic": "a b"},
    "a topic that is no text": {"topic": None},
    "a body that is no JSON": {"body": object()},
    "a body that is no Unicode": {"body": SURROGATE},
    "a JSON body that is no Unicode": {"body": {"a": SURROGATE}},
    "a body that is too large": {"body": b"x" * ((1 << 20) + 1)},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_malformed_message_is_refused_where_it_is_given(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        pack(Message(**({"topic": "t", "body": "x"} | fields)))


def test_a_body_that_contains_itself_is_refused() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(InvalidRequest, match="JSON"):
        pack(Message("t", body))


def test_an_instant_or_bytes_of_a_subclass_are_sent() -> None:
    """Pendulum's and pandas' are such, and HexBytes is a subclass of bytes. The encoder takes none: commits failed."""

    class Instant(datetime):
        pass

    class Bytes(bytes):
        pass

    given = Instant(2026, 11, 25, 12, 30, 1, 500, tzinfo=timezone(timedelta(hours=2)))
    packed = msgspec.msgpack.decode(
        encode_msgpack(pack(Message("t", Bytes(b"x"), deliver_at=given))), type=PackedMessage
    )
    assert packed.body == b"x"
    assert packed.deliver_at == given == datetime(2026, 11, 25, 10, 30, 1, 500, UTC)


@dataclasses.dataclass
class Event:
    """An event whose name is in its class, as many write it."""

    item: str
    name: str = dataclasses.field(default="order.placed", init=False)


@dataclasses.dataclass
class Envelope:
    events: list[Event]
    by_id: dict[str, Event]
    version: int = dataclasses.field(default_factory=lambda: 2, init=False)


def test_a_field_of_a_dataclass_that_its_class_has_is_sent() -> None:
    """msgspec leaves it out, and the consumer got an event without its name."""
    event, expected = Event("book"), {"item": "book", "name": "order.placed"}
    bodies: list[tuple[Any, Any]] = [
        (event, expected),
        ([1, event], [1, expected]),
        ({"event": (event,), "at": None}, {"event": [expected], "at": None}),
        (Envelope([event], {"a": event}), {"events": [expected], "by_id": {"a": expected}, "version": 2}),
    ]
    for body, wanted in bodies:
        packed = pack(Message("t", body))
        assert packed.body is not None and msgspec.json.decode(packed.body) == wanted
    assert vars(event) == {"item": "book"}, "the service's own object is as it was"


class Base(DeclarativeBase):
    pass


class Row(Base):
    """A row that writes itself as SQLModel's do: only the columns that are loaded."""

    __tablename__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    model_fields: ClassVar = {"id": None, "item": None}

    def model_dump_json(self) -> str:
        return msgspec.json.encode(
            {name: vars(self)[name] for name in self.model_fields if name in vars(self)}
        ).decode()


def test_a_row_is_sent_as_a_whole_after_a_commit() -> None:
    """The session had expired its columns, and the body was {}."""
    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        row = Row(id=1, item="book")
        session.add(row)
        session.commit()
        assert pack(Message("t", row)).body in (b'{"id":1,"item":"book"}', b'{"item":"book","id":1}')
        session.commit()
    with pytest.raises(DetachedInstanceError):
        pack(Message("t", row))


def test_subclasses_of_text_and_numbers_are_sent_as_such() -> None:
    class Colour(str, Enum):  # noqa: UP042  # as older code writes it; its str() is not its value
        RED = "red"

    class Kind(StrEnum):
        NEW = "new"

    class Text(str):
        pass

    packed = pack(Message(Text("t"), Text("x"), Kind.NEW, Colour.RED, {Text("a"): Kind.NEW}, 5, None, 7))
    assert msgspec.msgpack.decode(encode_msgpack(packed), type=PackedMessage) == PackedMessage(
        topic="t",
        body=b"x",
        key="new",
        tag="red",
        headers={"a": "new", "content-type": "text/plain; charset=utf-8"},
        delay=5.0,
        ttl=7.0,
    )


def test_a_malformed_message_refuses_nobody_else(memory: InMemoryServer, unique: str) -> None:
    """A malformed message among twenty others, whose halves leave in one request, fails alone."""

    async def scenario() -> list[Item | BaseException]:
        client = TransactionClient(memory.url, unique, instance="i", half_seconds=60)

        async def send(**fields: Any) -> Item:
            return await client.half([pack(Message(unique, "x", **fields))])

        try:
            return await asyncio.gather(send(tag=5), *[send() for _ in range(20)], return_exceptions=True)
        finally:
            await client.close()

    careless, *others = asyncio.run(scenario())
    assert isinstance(careless, InvalidRequest)
    assert [other.status for other in others if isinstance(other, Item)] == [201] * 20


def test_large_heads_are_counted_into_a_request(memory: InMemoryServer, unique: str) -> None:
    """A request is filled by its bytes, headers included: twelve transactions of 0.8 MB of headers need several."""

    async def scenario() -> list[Item | NotifyError]:
        client = TransactionClient(memory.url, unique, instance="i", half_seconds=60)
        messages = [pack(Message(unique, b"", headers={"h": "x" * 8000})) for _ in range(100)]
        try:
            return await asyncio.gather(*[client.half(messages) for _ in range(12)], return_exceptions=True)  # type: ignore[arg-type]
        finally:
            await client.close()

    assert [item.status if isinstance(item, Item) else item for item in asyncio.run(scenario())] == [201] * 12


def test_a_transaction_that_no_request_can_carry_is_refused_alone(memory: InMemoryServer, unique: str) -> None:
    async def scenario() -> list[Any]:
        client = TransactionClient(memory.url, unique, instance="i", half_seconds=60)
        large = [pack(Message(unique, b"x" * (1 << 20))) for _ in range(9)]
        small = [pack(Message(unique, b"x"))]
        try:
            halves = [client.half(messages) for messages in (small, large, small)]
            return await asyncio.gather(*halves, return_exceptions=True)
        finally:
            await client.close()

    first, refused, last = asyncio.run(scenario())
    assert isinstance(refused, TooLarge) and (first.status, last.status) == (201, 201)


@pytest.mark.parametrize("key", [b"order-1", bytearray(b"order-1"), lambda: b"order-1"])
def test_bytes_are_no_key(key: Any) -> None:
    """A key of type bytes is refused: its text would be b'order-1', with the quotes."""
    with pytest.raises(InvalidRequest, match="decode it"):
        resolve_key(Message("t", "body", key=key))


def test_a_database_error_in_a_late_key_is_raised_unchanged() -> None:
    """Whoever repeats a transaction after a deadlock looks for the database's own error."""

    def ask() -> str:
        raise OperationalError("SELECT 1", None, Exception("deadlock"))

    with pytest.raises(OperationalError):
        pack(Message("t", "body", key=ask))
