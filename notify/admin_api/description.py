"""The form of a write's description: sentences, a table and fields; and values as people write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.admin_api.words import count

MOST_ROWS = 200


@dataclass(slots=True)
class Rows:
    """A table: its headings, and its cells as text."""

    headings: Sequence[str]
    cells: Sequence[Sequence[str]]
    left_out: int = 0
    """Rows beyond MOST_ROWS."""


@dataclass(slots=True)
class Description:
    """The description of a write: sentences, a table if it concerns several things, and further fields by name."""

    sentences: list[str] = field(default_factory=list)
    rows: Rows | None = None
    facts: dict[str, str] = field(default_factory=dict)


def table(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """A table from rows with the same fields, with a heading for each field."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text(row.get(name)) for name in names] for row in rows[:MOST_ROWS]]
    return Rows([label(name) for name in names], cells, max(0, len(rows) - MOST_ROWS))


def label(name: str) -> str:
    """A field's name as a heading."""
    return name.replace("_", " ").capitalize()


def text(value: Any) -> str:
    """A value as a person writes it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return count(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {text(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(text(v) for v in value) or "none"
    return str(value)


def capital(sentence: str) -> str:
    """A text as a sentence, with a capital letter and a full stop."""
    return sentence[:1].upper() + sentence[1:] + "."


def messages(number: float) -> str:
    """A number of messages."""
    return "1 message" if number == 1 else f"{count(number)} messages"


def transactions(number: float) -> str:
    """A number of transactions."""
    return "1 transaction" if number == 1 else f"{count(number)} transactions"


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def by_job(result: Mapping[str, Any]) -> Description:
    """The description of a write that a job carries out."""
    jobs = result.get("jobs", ())  # one job for each worker
    if len(jobs) > 1:
        return Description([f"Jobs {', '.join(map(str, jobs))} do it; their pages show how far they are."])
    return Description([f"Job {result['job']} is running; see its page for progress."])
