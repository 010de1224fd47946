"""The columns of a table over time: later rows may have other columns than the table.

The manifest keeps the columns of all rows so far. Without that, the newest file would decide: rows that lack a column
would take it from all readers, and a narrower type would make older files unreadable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StructField,
    StructType,
)

from notify.errors import InvalidRequest

_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_WIDER: tuple[tuple[type[DataType], ...], ...] = (
    _WHOLE,
    (ByteType, ShortType, FloatType, DoubleType),
    (ByteType, ShortType, IntegerType, DoubleType),
)
"""Rows of types, each of which holds every value of those before it."""
_MOST_DIGITS = 38


def together(known: StructType, more: StructType, within: str = "") -> StructType:
    """The columns for the rows of both, those of `known` first. `within`: the column that these fields belong to.

    Raises InvalidRequest for a column of a type that does not go with its earlier one.
    """
    fields = {field.name: field.dataType for field in known}
    letters = {name.lower(): name for name in fields}
    for field in more:
        place = f"{within}{field.name}"
        if field.name in fields:
            fields[field.name] = _both(fields[field.name], field.dataType, place)
        elif _has_void(field.dataType):
            raise InvalidRequest(
                f"the column {place} is {field.dataType.simpleString()}, which no later value fits: cast it to its type"
            )
        elif (same := letters.get(field.name.lower())) is not None and not within:
            raise InvalidRequest(
                f"the table has the column {same}, and these rows have {place}: readers take these for one; rename it"
            )
        else:
            fields[field.name] = field.dataType
            letters[field.name.lower()] = field.name
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def _has_void(kind: DataType) -> bool:
    """Whether a type has a part without one, such as that of lit(None)."""
    if isinstance(kind, StructType):
        return any(_has_void(field.dataType) for field in kind)
    if isinstance(kind, MapType):
        return _has_void(kind.keyType) or _has_void(kind.valueType)
    return _has_void(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, NullType)


def _both(known: DataType, more: DataType, place: str) -> DataType:
    if isinstance(known, StructType) and isinstance(more, StructType):
        return together(known, more, f"{place}.")
    if isinstance(known, ArrayType) and isinstance(more, ArrayType):
        return ArrayType(_both(known.elementType, more.elementType, f"{place}[]"))
    if isinstance(known, MapType) and isinstance(more, MapType):
        key = _both(known.keyType, more.keyType, f"{place}[]")
        return MapType(key, _both(known.valueType, more.valueType, f"{place}[]"))
    if isinstance(known, DecimalType) and isinstance(more, DecimalType):
        scale = max(known.scale, more.scale)
        digits = max(known.precision - known.scale, more.precision - more.scale) + scale
        if digits <= _MOST_DIGITS:
            return DecimalType(digits, scale)
    if known == more:
        return known
    for row in _WIDER:
        if type(known) in row and type(more) in row:
            return max(known, more, key=lambda kind: row.index(type(kind)))
    raise InvalidRequest(
        f"the column {place} is {known.simpleString()} in the table, and {more.simpleString()} in these rows: cast it, "
        "or begin another table"
    )


def fitted(batches: Iterable[pa.RecordBatch], columns: StructType) -> Iterator[pa.RecordBatch]:
    """Rows with all these columns, null if they lack one, and times in UTC."""
    wanted = to_arrow_schema(columns, timezone="UTC")
    for batch in batches:
        names = set(batch.schema.names)
        arrays = [
            _of(batch.column(f.name), f.type) if f.name in names else pa.nulls(batch.num_rows, f.type) for f in wanted
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _of(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array as another type, with fields of structs by their names."""
    if array.type == kind:
        return array
    if pa.types.is_struct(kind):
        names = {field.name for field in array.type}
        fields = [_of(array.field(f.name), f.type) if f.name in names else pa.nulls(len(array), f.type) for f in kind]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    return array.cast(kind)
