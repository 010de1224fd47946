"""SQL expressions that convert columns to the values that Spark reads: ids to 16 bytes, times to microseconds.

A text that no version of the SDK writes as an id becomes NULL or another number of bytes, so that such a row does not
end an audit. Ids in upper case are converted. malformed.py reports both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

MOST_NUMBER = 9999
"""The highest message number that a message id can have."""
HAS_NUMBER = f"message_no BETWEEN 0 AND {MOST_NUMBER}"
"""Whether a row of half_message has a valid message number."""
_ID = "[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_DIGIT = "[0-9a-f]"
_ID_GLOB = "-".join([_DIGIT * 8, _DIGIT * 4, "7" + _DIGIT * 3, "[89ab]" + _DIGIT * 3, _DIGIT * 12])
_SHAPE = "________-____-____-____-____________"
_ID_CHARACTERS = len(_SHAPE)
_VERSION_AT, _VARIANT_AT = 15, 20
_FIRST, _LAST = "0001-01-01", "9999-12-31 23:59:59.999999"
_INSTANT_GLOB = re.sub("0", "[0-9]", "0000-00-00 00:00:00*")


@dataclass(frozen=True)
class Expressions:
    """The expressions for one kind of database: postgresql, mysql or sqlite."""

    kind: str

    def is_id(self, column: str) -> str:
        """Whether a column has a transaction id as the SDK writes it."""
        if self.kind == "postgresql":
            return f"({_is_uuid(column, '0-9a-f-')} AND {_is_version_7(column)})"
        if self.kind == "mysql":  # (?-i): the collation of the column may ignore case
            return f"{column} REGEXP '(?-i)^{_ID}$'"
        return f"(typeof({column}) = 'text' AND length(CAST({column} AS BLOB)) = 36 AND {column} GLOB '{_ID_GLOB}')"

    def is_message_id(self, column: str) -> str:
        """Whether a column has a message id as the SDK writes it."""
        if self.kind == "mysql":
            return f"{column} REGEXP '(?-i)^{_ID}[.](0|[1-9][0-9]{{0,3}})$'"
        number = f"substr({column}, {_ID_CHARACTERS + 2})"
        shape = (
            f"substr({column}, {_ID_CHARACTERS + 1}, 1) = '.' AND length({column}) >= {_ID_CHARACTERS + 2} "
            f"AND length({column}) <= {_ID_CHARACTERS + 5} AND ({number} = '0' OR substr({number}, 1, 1) <> '0')"
        )
        if self.kind == "sqlite":
            transaction = self.is_id(f"substr({column}, 1, {_ID_CHARACTERS})")
            # A text ends for `length` at a zero byte.
            is_text = f"typeof({column}) = 'text' AND length(CAST({column} AS BLOB)) = length({column})"
            return f"({is_text} AND {transaction} AND {shape} AND {number} NOT GLOB '*[^0-9]*')"
        # The expression makes as few texts as possible from the column, because it is computed for each row.
        dashes = f"length(replace({column}, '-', '')) = length({column}) - 4"
        is_uuid = f"substr({column}, 1, {_ID_CHARACTERS}) LIKE '{_SHAPE}' AND {column} !~ '[^0-9a-f.-]' AND {dashes}"
        return f"({shape} AND {is_uuid} AND {_is_version_7(column)} AND {number} !~ '[^0-9]')"

    def id_bytes(self, column: str, *, guarded: bool) -> str:
        """The 16 bytes of a transaction id or of the one in a message id.

        Another text gives NULL or another number of bytes. PostgreSQL fails on it, unless the expression is `guarded`,
        which takes three times as long.
        """
        text = column if column == "transaction_id" else f"substr({column}, 1, {_ID_CHARACTERS})"
        if self.kind != "postgresql":
            return f"unhex(replace({text}, '-', ''))"
        decoded = f"decode(replace({text}, '-', ''), 'hex')"
        return f"CASE WHEN {_is_uuid(text, '0-9A-Fa-f-')} THEN {decoded} END" if guarded else decoded

    @property
    def is_strict(self) -> bool:
        """Whether the database fails on a text that is not an id."""
        return self.kind == "postgresql"

    def message_number(self, column: str, *, guarded: bool) -> str:
        """The number in a message id; for another text any number. `guarded`: as in `id_bytes`."""
        number = f"substr({column}, {_ID_CHARACTERS + 2})"
        if self.kind == "postgresql":
            cast = f"CAST({number} AS integer)"
            return f"CASE WHEN {number} ~ '^[0-9]{{1,4}}$' THEN {cast} ELSE -1 END" if guarded else cast
        return f"CAST({number} AS {'SIGNED' if self.kind == 'mysql' else 'INTEGER'})"

    def microseconds(self, column: str) -> str:
        """An instant in microseconds since 1970; NULL for a value that is not an instant."""
        if self.kind == "mysql":
            return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column})"
        if self.kind == "postgresql":
            # A double is exact to the microsecond until 2106. EXTRACT computes in decimals, which takes longer.
            value = f"CAST(date_part('epoch', {column}) * 1000000 AS bigint)"
        else:
            fraction = f"CAST(substr(substr({column}, 21) || '000000', 1, 6) AS INTEGER)"
            value = f"(CAST(strftime('%s', {column}) AS INTEGER) * 1000000 + {fraction})"
        return f"CASE WHEN {self.is_instant(column)} THEN {value} END"

    def is_instant(self, column: str) -> str:
        """Whether a column has an instant: SQLite also stores any text, PostgreSQL infinity, MySQL a day 0."""
        return {
            "postgresql": f"({column} >= '{_FIRST}' AND {column} <= '{_LAST}')",
            "mysql": f"{column} >= '{_FIRST}'",
            "sqlite": (
                f"(typeof({column}) = 'text' AND {column} GLOB '{_INSTANT_GLOB}' AND "
                f"substr({column}, 20) || '0' NOT GLOB '*[^.0-9]*' AND strftime('%s', {column}) IS NOT NULL)"
            ),
        }[self.kind]

    def is_typed(self, column: sa.Column[Any]) -> str:
        """Whether a column's value has its type, as only SQLite does not see to itself; "" where nothing is to ask."""
        if self.kind != "sqlite":
            return ""
        name = column.name
        if isinstance(column.type, sa.DateTime):
            known = self.is_instant(name)
        else:
            known = f"typeof({name}) IN ({', '.join(map(repr, _types_of(column)))})"
        return f"({name} IS NULL OR {known})" if column.nullable else known

    def number(self, column: str) -> str:
        """A message's number: where SQLite has anything else there, -1."""
        if self.kind != "sqlite":
            return column
        return f"CASE WHEN typeof({column}) = 'integer' AND {HAS_NUMBER} THEN {column} ELSE -1 END"

    def is_no_instant(self, column: str) -> str:
        """Whether a column has no instant, as ranges that an index can find."""
        return {
            "postgresql": f"({column} < '{_FIRST}' OR {column} > '{_LAST}')",
            "mysql": f"{column} < '{_FIRST}'",
            "sqlite": f"NOT {self.is_instant(column)}",
        }[self.kind]


def _types_of(column: sa.Column[Any]) -> tuple[str, ...]:
    """The types of SQLite that the values of a column have."""
    if isinstance(column.type, sa.Float):
        return ("real", "integer")
    if isinstance(column.type, sa.LargeBinary):
        return ("blob",)
    return ("integer",) if isinstance(column.type, sa.Integer) else ("text",)


def _is_uuid(text: str, characters: str) -> str:
    """Whether a text is a UUID of these characters. A single regular expression would take five times as long."""
    return (
        f"({text} LIKE '{_SHAPE}' AND {text} !~ '[^{characters}]' "
        f"AND length(replace({text}, '-', '')) = {_ID_CHARACTERS - 4})"
    )


def _is_version_7(text: str) -> str:
    return f"substr({text}, {_VERSION_AT}, 1) = '7' AND substr({text}, {_VARIANT_AT}, 1) IN ('8', '9', 'a', 'b')"
