"""Decodes row events of Notify's tables by the column descriptions in the binlog itself.

The column names come from the table map (binlog_row_metadata=FULL), never from information_schema: after an ALTER the
table map still describes the columns with which each row was written. For each table map, lines of Python are
generated that read the wanted columns into variables and skip the others. This takes 3 µs for a row of 22 columns; the
general decoder of mysql-replication takes 60 µs (`python -m tools.bench bridge` measures it).
Formats: https://dev.mysql.com/doc/dev/mysql-server/latest/classbinary__log_1_1Table__map__event.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from notify.binlog_bridge.errors import Unreadable

_FIXED = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 7: 4, 8: 8, 9: 3, 10: 3, 11: 3, 12: 8, 13: 1}
"""The sizes, in bytes, of types with a fixed size: TINY, SHORT, LONG, FLOAT, DOUBLE, TIMESTAMP, …"""
_VARCHAR, _BIT, _TIMESTAMP2, _DATETIME2, _TIME2 = 15, 16, 17, 18, 19
_COMPRESSED_BLOB, _COMPRESSED_VARCHAR, _VECTOR = 140, 141, 242
_JSON, _NEWDECIMAL, _ENUM, _SET, _BLOB, _VAR_STRING, _STRING, _GEOMETRY = 245, 246, 247, 248, 252, 253, 254, 255
_BLOBS = {_BLOB, _JSON, _GEOMETRY, _VECTOR, _COMPRESSED_BLOB, 249, 250, 251}
_KINDS = {_COMPRESSED_BLOB: "compressed", _COMPRESSED_VARCHAR: "compressed"} | dict.fromkeys(
    (_JSON, _GEOMETRY, _VECTOR), "something else"
)
"""The kinds of values whose types are stored like texts, but are not texts."""
_COMPRESSED = frozenset((_COMPRESSED_BLOB, _COMPRESSED_VARCHAR))
_TEXTS = frozenset((_BLOB, _VAR_STRING, _STRING, _VARCHAR))
"""The types of columns that have a collation, also those of bytes. ENUM and SET are logged as a STRING, too."""
_INTEGERS, _FLOATS = (1, 2, 3, 8, 9), (4, 5)
_DECIMAL_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_DEFAULT_CHARSET, _COLUMN_CHARSET, _COLUMN_NAMES = 2, 3, 4
"""Fields of a table map's metadata."""
_PARTIAL_JSON = 1
"""The option of an updated row that has only the changed parts of JSON values."""


@dataclass(slots=True, frozen=True)
class Difference:
    """Something that MySQL and MariaDB encode differently."""

    what: str
    mysql: str
    mariadb: str


DIFFERENCES = (
    Difference("GTID", "event 33, or 42 with a tag: UUID and number", "event 162: number and domain"),
    Difference("GTIDs before a file", "event 35: intervals", "event 163: the last one of each domain"),
    Difference("row events", "30 and 31, with extra data that begins with its own length", "23 and 24, without"),
    Difference("bits after the last column, all columns present", "set", "cleared"),
    Difference("bits after the last column, some columns present", "cleared", "cleared"),
    Difference("bits of NULL after the last column", "cleared", "set"),
    Difference("BEGIN", "a statement of its own, event 2", "a flag of the GTID's event"),
    Difference("a whole transaction compressed", "event 40, which contains events without checksums", "never"),
    Difference("an event compressed", "never", "166 to 171 and 165: zlib after a byte with the length of the length"),
    Difference("parts of JSON values", "event 39, if a session has PARTIAL_JSON", "never: JSON is a text"),
    Difference("JSON", "type 245, binary", "type 252, a text"),
    Difference("VECTOR", "type 242, like a BLOB", "type 15, like a VARBINARY"),
    Difference("a compressed column", "there is none", "types 140 and 141, as long as BLOB and VARCHAR"),
    Difference("a heartbeat", "event 41 if the reader asks for it, otherwise 27", "event 27"),
)
"""The streams in tests/fixtures/binlog show each of these; a test checks that."""


@dataclass(slots=True, frozen=True)
class Column:
    """A column. `width` > 0: the size of its values in bytes; < 0: the size, in bytes, of the length before a value."""

    name: str
    type: int
    width: int
    fraction: int = 0
    nullable: bool = False
    collation: int = 0
    """The number of a text's collation, by which its character set is known; 0: unknown, or no text."""


@dataclass(slots=True, frozen=True)
class TableMap:
    """The content of a table map event."""

    schema: str
    table: str
    columns: tuple[Column, ...]


def length_encoded(data: bytes, at: int) -> tuple[int, int]:
    """A length-encoded integer, and the index after it."""
    first = data[at]
    if first < 251:
        return first, at + 1
    if first == 252:
        return int.from_bytes(data[at + 1 : at + 3], "little"), at + 3
    if first == 253:
        return int.from_bytes(data[at + 1 : at + 4], "little"), at + 4
    return int.from_bytes(data[at + 1 : at + 9], "little"), at + 9


def names_of(data: bytes) -> tuple[str, str]:
    """Schema and table in a table map event's body (after its table id and flags)."""
    size = data[8]
    schema = data[9 : 9 + size]
    at = 10 + size
    return schema.decode(), data[at + 1 : at + 1 + data[at]].decode()


def table_map(data: bytes) -> TableMap:
    """Decode a table map event's body. Raises Unreadable if it does not name the columns."""
    schema, table = names_of(data)
    at = 8 + 1 + len(schema.encode()) + 1 + 1 + len(table.encode()) + 1
    count, at = length_encoded(data, at)
    types = data[at : at + count]
    at += count
    size, at = length_encoded(data, at)
    shapes = column_shapes(types, data[at : at + size])
    at += size
    nullable = int.from_bytes(data[at : at + (count + 7) // 8], "little")
    at += (count + 7) // 8
    names: list[str] = []
    collations: Mapping[int, int] = {}
    while at < len(data):
        kind = data[at]
        size, at = length_encoded(data, at + 1)
        if kind in (_DEFAULT_CHARSET, _COLUMN_CHARSET):
            collations = _collations(kind, data[at : at + size], types, shapes)
        elif kind == _COLUMN_NAMES:
            inside, end = at, at + size
            while inside < end:
                length, inside = length_encoded(data, inside)
                names.append(data[inside : inside + length].decode())
                inside += length
        at += size
    if len(names) != count:
        raise Unreadable(
            f"the binlog does not name the columns of {schema}.{table}: set binlog_row_metadata = FULL on the source "
            "(SET GLOBAL binlog_row_metadata = 'FULL', and in its configuration), then start this bridge with "
            "--backfill, since what was written before cannot be read"
        )
    return TableMap(
        schema,
        table,
        tuple(
            Column(name, *shape, nullable=bool(nullable >> n & 1), collation=collations.get(n, 0))
            for n, (name, shape) in enumerate(zip(names, shapes, strict=True))
        ),
    )


def column_shapes(types: bytes, meta: bytes) -> list[tuple[int, int, int]]:
    """Type, width and fraction of each column."""
    shapes = []
    at = 0
    for kind in types:
        fraction = 0
        if kind in _FIXED:
            width = _FIXED[kind]
            at += kind in (4, 5)
        elif kind in _BLOBS:
            width, at = -meta[at], at + 1
        elif kind in (_TIMESTAMP2, _DATETIME2, _TIME2):
            fraction, at = meta[at], at + 1
            width = {_TIMESTAMP2: 4, _DATETIME2: 5, _TIME2: 3}[kind] + (fraction + 1) // 2
        elif kind in (_VARCHAR, _VAR_STRING, _COMPRESSED_VARCHAR):
            width = -1 if int.from_bytes(meta[at : at + 2], "little") < 256 else -2
            at += 2
        elif kind == _NEWDECIMAL:
            width = _decimal_bytes(meta[at], meta[at + 1])
            at += 2
        elif kind == _BIT:
            width = meta[at + 1] + (meta[at] > 0)
            at += 2
        elif kind in (_STRING, _ENUM, _SET):
            real, size = meta[at], meta[at + 1]
            at += 2
            if real & 0x30 != 0x30:
                size |= ((real & 0x30) ^ 0x30) << 4
                real |= 0x30
            width = size if real in (_ENUM, _SET) else -1 if size < 256 else -2
        else:
            raise Unreadable(
                f"a table of ours has a column of type {kind}, whose size this bridge does not know: upgrade the "
                "bridge, or drop the column and start this bridge with --backfill"
            )
        shapes.append((kind, width, fraction))
    return shapes


def _collations(kind: int, data: bytes, types: bytes, shapes: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """The number of each text column's collation, by the column's index. The metadata counts columns of texts and bytes
    only: either all of them, or those that differ from a default. Where a table has compressed columns, MariaDB's
    versions count in different ways, and nothing is taken from it."""
    if not _COMPRESSED.isdisjoint(types):
        return {}
    texts = [n for n, (type_, width, _) in enumerate(shapes) if type_ in _TEXTS and (type_ != _STRING or width < 0)]
    numbers: list[int] = []
    at = 0
    while at < len(data):
        number, at = length_encoded(data, at)
        numbers.append(number)
    if kind == _COLUMN_CHARSET:
        return dict(zip(texts, numbers, strict=True)) if len(texts) == len(numbers) else {}
    default, *others = numbers
    different = dict(zip(others[::2], others[1::2], strict=True))
    return {n: different.get(at, default) for at, n in enumerate(texts)}


def _decimal_bytes(precision: int, scale: int) -> int:
    whole = precision - scale
    return whole // 9 * 4 + _DECIMAL_BYTES[whole % 9] + scale // 9 * 4 + _DECIMAL_BYTES[scale % 9]


def check_columns(table: TableMap, wanted: Iterable[str]) -> None:
    """Raises Unreadable if the table lacks a wanted column."""
    missing = set(wanted) - {c.name for c in table.columns}
    if missing:
        raise Unreadable(
            f"table {table.schema}.{table.table} has no column {', '.join(sorted(missing))}: its schema is older or "
            "newer than this bridge; upgrade the one that is behind (`notify storage upgrade`, or the migration)"
        )


def documents_in(table: TableMap) -> int:
    """How many columns of MySQL's JSON a table has."""
    return sum(column.type == _JSON for column in table.columns)


def row_lines(columns: Sequence[Column], variables: Mapping[str, str], *, documents: int | None = None) -> list[str]:
    """Lines of Python that read one row image of `data` at the index `at`, and move `at` past it.

    `columns`: those that the image has. The lines store values as bytes, or None, in `variables` by column name; the
    other columns are skipped. `documents`: given for an image after an update of parts of JSON values: how many JSON
    columns the table has, whether the image has them or not.
    """
    lines = []
    if documents is not None:
        lines += [
            "options, at = length_encoded(data, at)",
            f"at += {(documents + 7) // 8} if options & {_PARTIAL_JSON} else 0",
        ]
    nulls = (len(columns) + 7) // 8
    # The code has only generated names (v0, v1, …) and numbers, and no text from the binlog.
    lines += [f"nulls = int.from_bytes(data[at:at + {nulls}], 'little')", f"at += {nulls}"]
    for number, column in enumerate(columns):
        variable = variables.get(column.name)
        lines += [f"if nulls & {1 << number}:", f"    {variable} = None" if variable else "    pass", "else:"]
        if column.width >= 0:
            step = str(column.width)
        else:
            step = "size"
            if column.width == -1:
                lines.append("    size = data[at]; at += 1")
            else:
                length = -column.width
                lines.append(f"    size = int.from_bytes(data[at:at + {length}], 'little'); at += {length}")
        if variable:
            lines.append(f"    {variable} = data[at:at + {step}]")
        lines.append(f"    at += {step}")
    return lines


def column(table: TableMap, name: str) -> Column:
    return next(c for c in table.columns if c.name == name)


def family(column: Column) -> str:
    """The kind of a column's values: a text, an integer, a float, a datetime, or something else."""
    if column.width < 0:
        return _KINDS.get(column.type, "text")
    families = dict.fromkeys(_INTEGERS, "integer") | dict.fromkeys(_FLOATS, "float") | {_DATETIME2: "datetime"}
    return families.get(column.type, "something else")


_AS_UTF8 = (
    (11, 11), (33, 33), (45, 46), (63, 63), (65, 65), (76, 76), (83, 83), (192, 247), (255, 323), (576, 639),
)  # fmt: skip
_WIDE = ((35, 35), (54, 56), (60, 62), (90, 90), (101, 183), (640, 767))
_MOST_KNOWN, _NOPAD, _UCA_1400 = 767, 1024, 2048


def is_read_as_utf8(collation: int) -> bool:
    """Whether the texts of a collation are ASCII, UTF-8 or bytes; True for numbers that no server has so far.

    MariaDB adds 1024 to a number for NO PAD, and numbers those of UCA 14.0.0 from 2048 on: 256 for each of utf8mb3,
    utf8mb4, ucs2, utf16 and utf32.
    """
    if collation >= _UCA_1400:
        return not _UCA_1400 + 2 * 256 <= collation < _UCA_1400 + 5 * 256
    base = collation % _NOPAD
    return base == 0 or 324 <= base <= 575 or base > _MOST_KNOWN or _is_in(base, _AS_UTF8)


def is_wide(collation: int) -> bool:
    """Whether the texts of a collation differ from UTF-8 even where they are ASCII (UTF-16, UTF-32, UCS-2)."""
    if collation >= _UCA_1400:
        return not is_read_as_utf8(collation)
    return _is_in(collation % _NOPAD, _WIDE)


def _is_in(number: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in ranges)


def double(value: bytes) -> float:
    """Decode a DOUBLE or FLOAT."""
    (number,) = struct.unpack("<d" if len(value) == 8 else "<f", value)
    return float(number)


def packed(seconds: float) -> bytes:
    """The bytes of a DATETIME without a fraction, from seconds since 1970; those of all times before it are smaller."""
    at = datetime.fromtimestamp(max(0.0, seconds), UTC)
    days = (at.year * 13 + at.month) << 5 | at.day
    return ((days << 17 | at.hour << 12 | at.minute << 6 | at.second) + 0x8000000000).to_bytes(5, "big")


def moment(value: bytes, fraction: int) -> datetime:
    """Decode a DATETIME with `fraction` digits after the second; the tables have times in UTC."""
    packed = int.from_bytes(value[:5], "big") - 0x8000000000
    days, seconds = packed >> 17, packed & 0x1FFFF
    months, day = days >> 5, days & 31
    micro = 0
    if len(value) > 5:
        micro = int.from_bytes(value[5:], "big") * 100 ** (3 - (fraction + 1) // 2)
    return datetime(months // 13, months % 13, day, seconds >> 12, seconds >> 6 & 63, seconds & 63, micro, tzinfo=UTC)
