"""JSON bodies as typed values: what does not fit is kept as it was sent, and nothing is guessed."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("pyspark")
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from notify.errors import InvalidRequest
from notify.spark.messages.infer import fields_of
from notify.spark.messages.typed import TypedBodies


def typed(*fields: T.StructField) -> TypedBodies:
    kind = T.StructType(list(fields))
    return TypedBodies(kind, to_arrow_type(kind, timezone="UTC"))


def one(bodies: TypedBodies, value: Any) -> tuple[Any, Any]:
    """The value and what was left over, through Arrow, as Spark gets them."""
    values, rescued = bodies.columns([value if isinstance(value, bytes) else json.dumps(value).encode()])
    rest = rescued[0].as_py()
    return values[0].as_py(), rest


ITEM = T.StructField("item", T.StringType())
COUNT = T.StructField("count", T.IntegerType())


def test_fitting_fields_are_in_the_value() -> None:
    assert one(typed(ITEM, COUNT), {"item": "book", "count": 2}) == ({"item": "book", "count": 2}, None)
    assert one(typed(ITEM, COUNT), {"count": None}) == ({"item": None, "count": None}, None)


@pytest.mark.parametrize(
    ("kind", "fits", "value"),
    [
        (T.LongType(), 1 << 62, 1 << 62),
        (T.DoubleType(), 3, 3.0),
        (T.DecimalType(20, 2), 12345678901234567.5, None),
        (T.DecimalType(6, 2), "12.50", Decimal("12.50")),
        (T.BinaryType(), "aGk=", b"hi"),
        (T.DateType(), "2026-11-23", date(2026, 11, 23)),
        (T.TimestampType(), "2026-11-23T10:00:00+02:00", datetime(2026, 11, 23, 8, tzinfo=UTC)),
        (T.StringType(), {"a": [1, 2.50]}, None),
        (T.ArrayType(T.LongType()), [1, None], [1, None]),
        (T.MapType(T.StringType(), T.LongType()), {"a": 1}, [("a", 1)]),
    ],
)
def test_each_kind_of_value(kind: T.DataType, fits: Any, value: Any) -> None:
    got, rest = one(typed(T.StructField("x", kind)), {"x": fits})
    assert rest is None
    assert got["x"] == value if value is not None else got["x"] is not None


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (T.IntegerType(), 1 << 31), (T.IntegerType(), 1.5), (T.IntegerType(), "1"), (T.IntegerType(), True),
        (T.BooleanType(), 1), (T.DoubleType(), "1.5"), (T.DecimalType(4, 2), 100), (T.DecimalType(4, 2), 1.234),
        (T.DateType(), "today"), (T.TimestampType(), 5), (T.TimestampNTZType(), "2026-11-23T10:00:00Z"),
        (T.BinaryType(), "no base64!"), (T.ArrayType(T.LongType(), False), [None]), (T.ArrayType(T.LongType()), {}),
        (T.MapType(T.StringType(), T.LongType()), {"a": "b"}), (T.StructType([COUNT]), [1]), (T.FloatType(), 1e300),
        (T.TimestampType(), "0001-01-01T00:00:00+14:00"), (T.TimestampType(), "9999-12-31T23:00:00-01:00"),
    ],
)  # fmt: skip
def test_other_fields_are_rescued_unchanged(kind: T.DataType, other: Any) -> None:
    got, rest = one(typed(ITEM, T.StructField("x", kind)), {"item": "book", "x": other})
    assert got == {"item": "book", "x": None}
    assert json.loads(rest) == {"x": other}


def test_fields_that_the_type_does_not_name_are_rescued() -> None:
    inner = T.StructField("who", T.StructType([ITEM]))
    assert one(typed(ITEM), {"item": "a", "more": [1.10]}) == ({"item": "a"}, '{"more":[1.1]}')
    got, rest = one(typed(inner), {"who": {"item": "a", "more": 1}})
    assert got == {"who": {"item": "a"}} and json.loads(rest) == {"who": {"item": "a", "more": 1}}


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'"text"', b"", b'{"item": '])
def test_a_body_that_is_not_an_object_is_kept_as_text(body: bytes) -> None:
    assert one(typed(ITEM), body) == (None, body.decode())


def test_bytes_that_are_no_text_are_kept_in_base64() -> None:
    assert one(typed(ITEM), b"\xff\x00") == (None, "base64:/wA=")


def test_numbers_keep_their_digits() -> None:
    amount = T.StructField("amount", T.DecimalType(38, 10))
    got, _ = one(typed(amount), b'{"amount": 12345678901234567890.0123456789}')
    assert got["amount"] == Decimal("12345678901234567890.0123456789")
    assert one(typed(ITEM), b'{"big": 1e400, "long": 123456789012345678901234567890}')[1] == (
        '{"big":1E+400,"long":123456789012345678901234567890}'
    )


def test_a_required_field_that_is_missing_leaves_no_value() -> None:
    required = T.StructField("id", T.LongType(), nullable=False)
    assert one(typed(required, ITEM), {"item": "a"}) == (None, '{"item": "a"}')


@pytest.mark.parametrize("kind", [T.DayTimeIntervalType(), T.MapType(T.LongType(), T.StringType())])
def test_types_without_a_form_in_json_are_refused(kind: T.DataType) -> None:
    with pytest.raises(InvalidRequest, match="option schema"):
        typed(T.StructField("x", kind))


# --- inferring ------------------------------------------------------------------------------------------------------


def inferred(*bodies: Any) -> str:
    return fields_of(json.dumps(body).encode() for body in bodies)


def test_the_narrowest_type_that_all_fit() -> None:
    assert inferred({"a": 1}, {"a": 1.5}, {"a": None}) == "`a`: double"
    assert inferred({"a": 1}, {"a": "x"}) == "`a`: string"
    assert inferred({"a": 1 << 64}) == "`a`: string"
    assert inferred({"a": {"b": [1]}}, {"a": {"c": True}}) == "`a`: struct<`b`: array<bigint>, `c`: boolean>"
    assert inferred({"a": []}, {"a": [{"b": 1}, {"b": 2.5}]}) == "`a`: array<struct<`b`: double>>"
    assert inferred({"a": None, "e": {}}) == "`a`: string, `e`: string"
    assert inferred([1], "text", 5) == "" and fields_of([b"\xff", b"{"]) == ""


def test_names_that_spark_takes_for_one_are_one() -> None:
    assert inferred({"a": 1, "A": 2, "": 3, "`": 4}) == "`a`: bigint, ````: bigint"
