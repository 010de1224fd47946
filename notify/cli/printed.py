"""The only module that prints. It makes text from servers, databases and messages safe for rich and for terminals.

A key may be `[/red]`, which rich takes for markup, or contain escape sequences, which move a terminal's cursor or set
its title. All text passes `visible`; tests/unit/test_printed.py checks that no command prints in another way. Under
`notify.cli.main.main` all output, also typer's, goes to an `Output`.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from notify.admin_api import words
from notify.runtime.visible import visible

if TYPE_CHECKING:
    from rich.progress import Progress

GAP = 2
"""The number of blanks between columns."""
ERRORS_AS_JSON = "notify.errors_as_json"
"""The key in a command's context under which `--json` is noted."""


class OutputLost(OSError):
    """Standard output or standard error cannot be written: its reader is gone, or its disk is full."""


class Output:
    """Standard output or standard error. Raises OutputLost if it cannot be written, unlike any other file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _as_lost():
            return self._stream.write(text)

    def flush(self) -> None:
        with _as_lost():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


def say(text: str, *, err: bool = False) -> None:
    """Print a line."""
    typer.echo(visible(text), err=err)


def log_to_stderr() -> None:
    """Print the log of a command that runs until it is told to stop."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")


def say_paragraph(text: str, indent: int = 0) -> None:
    """Print a sentence, wrapped to the terminal's width."""
    _wrapped(visible(text), indent, indent)


def say_json(value: Any) -> None:
    """Print one JSON object on one line, in ASCII."""
    typer.echo(json.dumps(value))


def console(*, stderr: bool = False) -> Console:
    """A console without markup, emoji and highlighting."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def cell(value: Any, style: str = "") -> Text:
    """A value as a table cell: the items of a list on separate lines, a dict as its fields."""
    return Text(_text(value), style=style)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(_text(v) for v in value[:50])
    if isinstance(value, dict):
        return ", ".join(f"{visible(str(k))} {_text(v)}" for k, v in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else visible(str(value))


def progress(quiet: bool, *, transient: bool = True) -> Progress:
    """A bar on standard error: none if `quiet`, or if no person reads it, for whom rich would write an empty line."""
    from rich.progress import Progress

    shown = console(stderr=True)
    return Progress(console=shown, disable=quiet or not shown.is_terminal, transient=transient)


def latency(seconds: float | None) -> str:
    """A short time with its unit; `-` if nothing was measured, as for any value that is missing."""
    return "-" if seconds is None else words.latency(seconds)


def is_terminal() -> bool:
    """Whether a person reads stdout, not another program."""
    return sys.stdout.isatty()


def say_fields(values: Iterable[Any]) -> None:
    """Print a row for another program: all fields in full, on one line, with tabs between them."""
    typer.echo("\t".join(visible(_text(value).replace("\n", "; ")) for value in values))


def say_table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], indent: int = 0, *, keeps_lines: bool = False
) -> None:
    """Print a list: as many columns side by side as the terminal has room for, and the others on a further line
    below. No column is cut. `keeps_lines`: texts of several lines, such as tracebacks, are printed below as they are.
    """
    cells, texts = [], []
    for row in rows:
        texts.append([value if keeps_lines and isinstance(value, str) and "\n" in value else "" for value in row])
        pairs = zip(row, texts[-1], strict=True)
        cells.append(["" if text else _text(value).replace("\n", ", ") for value, text in pairs])
    names = [visible(heading) for heading in headings]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    width = _width() - indent
    shown = len(names)
    while shown > 1 and sum(widths[:shown]) + GAP * (shown - 1) > width:
        shown -= 1
    _line([set_cell_size(name, size) for name, size in zip(names[:shown], widths, strict=False)], indent, style="bold")
    for row, lines in zip(cells, texts, strict=True):
        _line([set_cell_size(text, size) for text, size in zip(row[:shown], widths, strict=False)], indent)
        rest = zip(names[shown:], row[shown:], strict=True)
        if below := " · ".join(f"{name}: {text}" for name, text in rest if text not in ("", "-")):
            _wrapped(below, indent + 4, indent + 6)
        for name, text in zip(names, lines, strict=True):
            if text:
                _line([f"{name}:"], indent + 4)
                for line in visible(text).splitlines():
                    _wrapped(line, indent + 6, indent + 8)


def say_record(values: Mapping[str, Any], indent: int = 0) -> None:
    """Print a record: first the fields with one value, then each field with several values as a separate part."""
    parts = {name: value for name, value in values.items() if value and _has_fields(value)}
    names = {name: visible(name.replace("_", " ")) for name in values}
    width = max([cell_len(names[name]) for name in values if name not in parts], default=0)
    for name, value in values.items():
        if name not in parts:
            value_text = "none" if value in ([], {}) else _text(value).replace("\n", ", ") or "-"
            _wrapped(f"{set_cell_size(names[name], width)}  {value_text}", indent, indent + width + GAP)
    for name, value in parts.items():
        _line([f"{names[name]}:"], indent, style="bold")
        if isinstance(value, dict):
            say_record(value, indent + 2)
        else:
            headings = list(dict.fromkeys(field for row in value for field in row))
            rows = [[row.get(field, "") for field in headings] for row in value]
            say_table([heading.replace("_", " ") for heading in headings], rows, indent + 2, keeps_lines=True)


def _has_fields(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(row, dict) for row in value))


def _width() -> int:
    """The terminal's columns; for other programs a line is as long as it needs to be."""
    return console().width if is_terminal() else 1_000_000


def _line(texts: Sequence[str], indent: int, style: str = "") -> None:
    line = Text(" " * indent + (" " * GAP).join(texts).rstrip(), style=style)
    console().print(line, soft_wrap=True)


def _wrapped(text: str, indent: int, below: int) -> None:
    """Print a text, with its first line indented by `indent` and the others by `below`."""
    width = max(_width(), below + 20)
    for line in textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * below) or [text]:
        _line([line], 0)


class Rows(Table):
    """A table whose cells may be any values."""

    def __init__(self, *columns: str, **options: Any) -> None:
        super().__init__(*[visible(name) for name in columns], **options)

    def add_row(self, *values: Any, **options: Any) -> None:
        super().add_row(*[cell(value) for value in values], **options)
