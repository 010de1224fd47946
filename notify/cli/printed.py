"""The only module that prints. It makes text from servers, databases and messages safe for rich and for terminals.

A key may be `[/red]`, which rich takes for markup, or hold escape sequences, which move a terminal's cursor or set its
title. All text passes `visible`; tests/unit/test_printed.py checks that no command prints by itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

ERRORS_AS_JSON = "notify.errors_as_json"
"""The key in a command's context under which `--json` is noted."""


def visible(text: str) -> str:
    """The text with invisible characters (control characters, direction marks, surrogates) escaped as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str, *, err: bool = False) -> None:
    """Print a line."""
    typer.echo(visible(text), err=err)


def say_json(value: Any) -> None:
    """Print one JSON object on one line, in ASCII."""
    typer.echo(json.dumps(value))


def console(*, stderr: bool = False) -> Console:
    """A console without markup, emoji and highlighting."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def cell(value: Any, style: str = "") -> Text:
    """A value as a table cell: the items of a list on lines of their own, a dict as its fields."""
    return Text(_text(value), style=style)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(_text(v) for v in value[:50])
    if isinstance(value, dict):
        return ", ".join(f"{visible(str(k))} {_text(v)}" for k, v in value.items())
    return "-" if value is None else visible(str(value))


def is_terminal() -> bool:
    """Whether a person reads stdout, not another program."""
    return sys.stdout.isatty()


def say_fields(values: Iterable[Any]) -> None:
    """Print a row for another program: fields with tabs between them, on one line, nothing cut off."""
    typer.echo("\t".join(visible(_text(value).replace("\n", "; ")) for value in values))


class Rows(Table):
    """A table whose cells may be any values."""

    def __init__(self, *columns: str, **options: Any) -> None:
        super().__init__(*[visible(name) for name in columns], **options)

    def add_row(self, *values: Any, **options: Any) -> None:
        super().add_row(*[cell(value) for value in values], **options)
