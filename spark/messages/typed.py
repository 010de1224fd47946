"""JSON bodies as values of a type: fields that fit go into the column `value`, the others into `rescued`.

A field of the body that the type does not name, or whose value does not fit, goes into `rescued` unchanged, and so
does a body that is not a JSON object. Nothing is guessed: "12" is not a number, and 1.5 is not an integer.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE

Convert = Callable[[Any], Any]
"""The value of a JSON value. Raises ValueError for one that does not fit."""
decode = msgspec.json.Decoder(float_hook=Decimal).decode
"""JSON with every digit of its numbers."""
_encode = msgspec.json.Encoder(decimal_format="number").encode
_EXACT = Context(prec=200)
_INTEGERS = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}


class TypedBodies:
    """Bodies of one type."""

    def __init__(self, kind: T.StructType, arrow: pa.DataType) -> None:
        """`arrow`: the same type in Arrow. Raises InvalidRequest for types that JSON has no form of."""
        self._arrow = arrow
        self._fields = {field.name: (_converter(field.dataType, field.name), field.nullable) for field in kind}
        self._required = [field.name for field in kind if not field.nullable]

    def columns(self, bodies: Sequence[bytes | None]) -> tuple[pa.Array, pa.Array]:
        """The columns `value` and `rescued`."""
        rows = [self.one(body) for body in bodies]
        return pa.array([value for value, _ in rows], self._arrow), pa.array([rest for _, rest in rows], pa.string())

    def one(self, body: bytes | None) -> tuple[dict[str, Any] | None, str | None]:
        """A body's value, or None, and the part that did not fit, or None if everything did."""
        if body is None:
            return None, None
        try:
            given = decode(body)
        except UNDECODABLE:
            return None, _text(body)
        if not isinstance(given, dict):
            return None, _text(body)
        value: dict[str, Any] = {}
        rescued: dict[str, Any] = {}
        for name, each in given.items():
            known = self._fields.get(name)
            if known is None:
                rescued[name] = each
                continue
            try:
                value[name] = None if each is None else known[0](each)
            except _MoreFields as error:
                value[name] = error.value
                rescued[name] = each
            except ValueError:
                rescued[name] = each
        if any(value.get(name) is None for name in self._required):
            return None, _text(body)
        return value, _encode(rescued).decode() if rescued else None


class _MoreFields(Exception):
    """An object within the body fits, and has fields that its type does not name."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _text(body: bytes) -> str:
    """A body as text; if it is not UTF-8, `base64:` and its bytes."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(body).decode()


def _converter(kind: T.DataType, name: str) -> Convert:
    """The function that makes values of a type. Raises InvalidRequest."""
    if isinstance(kind, T.StructType):
        return _struct(kind, name)
    if isinstance(kind, T.ArrayType):
        return _array(kind, name)
    if isinstance(kind, T.MapType):
        return _map(kind, name)
    if isinstance(kind, T.DecimalType):
        return _decimal(kind)
    for integer, bits in _INTEGERS.items():
        if isinstance(kind, integer):
            return _integer(bits)
    convert = _SIMPLE.get(type(kind))
    if convert is None:
        raise InvalidRequest(
            f"option schema: {name} is {kind.simpleString()}, which JSON has no form of; use string, boolean, a "
            "number, binary (base64), date, timestamp, array, map or struct"
        )
    return convert


def _struct(kind: T.StructType, name: str) -> Convert:
    fields = {field.name: (_converter(field.dataType, f"{name}.{field.name}"), field.nullable) for field in kind}

    def convert(given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError
        value: dict[str, Any] = {}
        has_more = False
        for inner, each in given.items():
            if (known := fields.get(inner)) is None:
                has_more = True
                continue
            try:
                value[inner] = None if each is None else known[0](each)
            except _MoreFields as error:
                value[inner] = error.value
                has_more = True
        if any(not nullable and value.get(inner) is None for inner, (_, nullable) in fields.items()):
            raise ValueError
        if has_more:
            raise _MoreFields(value)
        return value

    return convert


def _array(kind: T.ArrayType, name: str) -> Convert:
    element, may_be_null = _converter(kind.elementType, f"{name}[]"), kind.containsNull

    def convert(given: Any) -> Any:
        if not isinstance(given, list) or (not may_be_null and None in given):
            raise ValueError
        return _each(element, given)

    return convert


def _map(kind: T.MapType, name: str) -> Convert:
    if not isinstance(kind.keyType, T.StringType):
        raise InvalidRequest(f"option schema: the keys of {name} are {kind.keyType.simpleString()}; in JSON they are "
                             "string")  # fmt: skip
    element, may_be_null = _converter(kind.valueType, f"{name}[]"), kind.valueContainsNull

    def convert(given: Any) -> Any:
        if not isinstance(given, dict) or (not may_be_null and None in given.values()):
            raise ValueError
        try:
            return list(zip(given, _each(element, list(given.values())), strict=True))
        except _MoreFields as error:
            raise _MoreFields(list(zip(given, error.value, strict=True))) from None

    return convert


def _each(element: Convert, given: list[Any]) -> list[Any]:
    values = []
    has_more = False
    for each in given:
        try:
            values.append(None if each is None else element(each))
        except _MoreFields as error:
            values.append(error.value)
            has_more = True
    if has_more:
        raise _MoreFields(values)
    return values


def _integer(bits: int) -> Convert:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def convert(given: Any) -> int:
        if type(given) is not int or not least <= given <= most:
            raise ValueError
        return given

    return convert


def _decimal(kind: T.DecimalType) -> Convert:
    most, unit = Decimal(10) ** (kind.precision - kind.scale), Decimal(1).scaleb(-kind.scale)

    def convert(given: Any) -> Decimal:
        if type(given) not in (int, Decimal, str):
            raise ValueError
        try:
            number = Decimal(given)
        except InvalidOperation:
            raise ValueError from None
        if not number.is_finite() or abs(number) >= most:
            raise ValueError
        if number != (rounded := number.quantize(unit, context=_EXACT)):
            raise ValueError
        return rounded

    return convert


def _string(given: Any) -> str:
    """Text; another value as its JSON."""
    return given if isinstance(given, str) else _encode(given).decode()


def _boolean(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError
    return given


def _double(given: Any, most: float = sys.float_info.max) -> float:
    if type(given) not in (int, Decimal):
        raise ValueError
    try:
        number = float(given)
    except OverflowError:
        raise ValueError from None
    if abs(number) > most:
        raise ValueError
    return number


_float = partial(_double, most=float(np.finfo(np.float32).max))


def _binary(given: Any) -> bytes:
    if not isinstance(given, str):
        raise ValueError
    try:
        return base64.b64decode(given, validate=True)
    except binascii.Error:
        raise ValueError from None


def _date(given: Any) -> date:
    if not isinstance(given, str):
        raise ValueError
    return date.fromisoformat(given)


def _timestamp(given: Any) -> datetime:
    if not isinstance(given, str):
        raise ValueError
    moment = datetime.fromisoformat(given)
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    try:
        return moment.astimezone(UTC)
    except OverflowError:  # no timestamp of Spark's, whose readers in Python fail on it
        raise ValueError from None


def _local_time(given: Any) -> datetime:
    if not isinstance(given, str):
        raise ValueError
    moment = datetime.fromisoformat(given)
    if moment.tzinfo is not None:
        raise ValueError
    return moment


_SIMPLE: dict[type[T.DataType], Convert] = {
    T.StringType: _string,
    T.BooleanType: _boolean,
    T.FloatType: _float,
    T.DoubleType: _double,
    T.BinaryType: _binary,
    T.DateType: _date,
    T.TimestampType: _timestamp,
    T.TimestampNTZType: _local_time,
}
