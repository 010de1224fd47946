"""The type of JSON bodies, inferred from the newest messages of a query's topics."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE
from notify.spark.messages.options import Options
from notify.spark.messages.planning import Planning
from notify.spark.messages.reading import Reading
from notify.spark.messages.typed import decode

DEEPEST = 16
MOST_FIELDS = 1000
"""An object that is deeper, or has more fields in all bodies together, is text: its JSON."""

Kind = str | dict[str, Any] | list[Any]
"""A DDL type; a dict of the fields of an object; a list with the type of an array's elements; "" for null alone."""


def inferred(options: Options) -> str:
    """The fields of the bodies, as DDL. Raises InvalidRequest where no body is a JSON object."""
    bodies: list[bytes] = []
    with closing(Planning(options)) as planning:
        end = planning.latest()
        queues = sum(len(each.next) for each in end.values())
        most = max(1, options.infer_rows // max(1, queues))
        start = {
            topic: replace(each, next={queue: max(0, at - most) for queue, at in each.next.items()})
            for topic, each in end.items()
        }
        pieces = planning.pieces(start, end)
    with Reading(replace(options, fails_on_loss=False)) as reading:
        for piece in pieces:
            for batch in reading.rows(piece):
                bodies += batch.column("body").to_pylist()
    fields = fields_of(body for body in bodies if body is not None)
    if not fields:
        raise InvalidRequest(
            f"option schema: none of the newest {len(bodies)} messages of {', '.join(options.topics)} is a JSON "
            'object, so that no type can be inferred: give it as DDL, such as "item string, amount double"'
        )
    return fields


def fields_of(bodies: Iterable[bytes]) -> str:
    """The fields of the type that all these bodies fit, as DDL; "" where none of them is a JSON object."""
    whole: Kind = ""
    for body in bodies:
        try:
            given = decode(body)
        except UNDECODABLE:
            continue
        if isinstance(given, dict):
            whole = _merged(whole, _kind(given, 0))
    return _fields(whole) if isinstance(whole, dict) else ""


def _kind(given: Any, depth: int) -> Kind:
    if given is None:
        return ""
    if isinstance(given, bool):
        return "boolean"
    if isinstance(given, int):
        return "bigint" if -(1 << 63) <= given < 1 << 63 else "string"
    if isinstance(given, Decimal):
        return "double"
    if isinstance(given, str) or depth >= DEEPEST:
        return "string"
    if isinstance(given, dict):
        fields = {name: _kind(each, depth + 1) for name, each in given.items()}
        return fields if 0 < len(fields) <= MOST_FIELDS else "string"
    element: Kind = ""
    for each in given:
        element = _merged(element, _kind(each, depth + 1))
    return [element]


def _merged(one: Kind, other: Kind) -> Kind:
    """The narrowest type that both fit."""
    if one == other or other == "":
        return one
    if one == "":
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        merged = {name: _merged(one.get(name, ""), other.get(name, "")) for name in {**one, **other}}
        return merged if len(merged) <= MOST_FIELDS else "string"
    if isinstance(one, list) and isinstance(other, list):
        return [_merged(one[0], other[0])]
    if {str(one), str(other)} == {"bigint", "double"}:
        return "double"
    return "string"


def _fields(kind: dict[str, Any]) -> str:
    """Fields whose names differ by case alone are one to Spark: of these, and of a name without a letter, none is
    listed but the first."""
    first = {name.lower(): name for name in reversed(kind) if name}
    return ", ".join(
        f"`{name.replace('`', '``')}`: {_ddl(kind[name])}" for name in kind if first.get(name.lower()) == name
    )


def _ddl(kind: Kind) -> str:
    if isinstance(kind, dict):
        return f"struct<{_fields(kind)}>"
    if isinstance(kind, list):
        return f"array<{_ddl(kind[0])}>"
    return kind or "string"
