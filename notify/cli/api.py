"""Makes requests to a server's admin routes, and prints their answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import msgspec
import typer

from notify.cli.printed import (
    ERRORS_AS_JSON,
    console,
    is_terminal,
    say,
    say_fields,
    say_json,
    say_record,
    say_table,
)
from notify.client.transport.foreign_answers import foreign_content
from notify.client.transport.http import read_answer
from notify.client.transport.servers import Servers
from notify.errors import InvalidRequest
from notify.protocol.limits import digits
from notify.protocol.wire import JSON

LISTING_SECONDS = 10.0
"""How long a server may take to say which servers there are."""
URL = typer.Option("http://127.0.0.1:7400", envvar="NOTIFY_URL", help="The server's address. [env: NOTIFY_URL]")


def _note_json(context: typer.Context, value: bool) -> bool:
    context.meta[ERRORS_AS_JSON] = value
    return value


AS_JSON = typer.Option(
    False, "--json", envvar="NOTIFY_JSON", callback=_note_json,
    help="Print one JSON object on stdout, and nothing else; for an error it has the field error.",
)  # fmt: skip
WATCH = typer.Option(
    0.0, "--watch", min=0, max=3600, help="Show it again at this interval in seconds, until Ctrl-C; 0: once."
)
REASON = typer.Option(..., "--reason", envvar="NOTIFY_REASON", help="Why you do this; it is recorded with your name.")
DRY_RUN = typer.Option(
    False, "--dry-run", envvar="NOTIFY_DRY_RUN", help="Change nothing; only show what would be done."
)

WIDE = typer.Option(False, "--wide", envvar="NOTIFY_WIDE", help="Show every field of each row.")


def call(
    url: str, method: str, *parts: str, query: str = "", body: dict[str, Any] | None = None, here: bool = False
) -> dict[str, Any]:
    """Make one admin request. Raises NotifyError with the server's error.

    It goes to a server with queues. With `here`, and for transactions, it goes to the server at `url`.
    """
    for part in parts:
        if "/" in part or part in ("", ".", ".."):  # in a path, it would not be exactly one part
            raise InvalidRequest(f"{part[:60]!r} is not a name: 1 to 127 of A-Z a-z 0-9 . _ -", "invalid_name")
    is_here = here or parts[0] == "transactions"

    async def ask() -> bytes:
        http = Servers(url, "transactions" if is_here else "queue")
        try:
            if not is_here:
                # The server at the address may have no queues, but it knows the servers that have them.
                await http.refresh(LISTING_SECONDS)
            path = "/v1/admin/" + "/".join(quote(part, safe="") for part in parts) + query
            data = msgspec.json.encode(body) if body is not None else b""
            return await http.call(method, path, data, 60, JSON, of_all=True)
        finally:
            await http.aclose()

    return read_answer(_decode_answer, asyncio.run(ask()))


class _Answer(dict[str, Any]):
    """An answer whose fields are asked for. Raises ForeignAnswer for a missing one: another program has answered."""

    def __missing__(self, name: str) -> Any:
        raise foreign_content(f"it has no field {name}")


_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


def _decode_answer(answer: bytes) -> dict[str, Any]:
    return _Answer(_decode_fields(answer))


def check_answers(url: str) -> None:
    """Raises NotifyError if no server at `url` answers; a producer would try again for 10 s before it says so."""

    async def ask() -> None:
        http = Servers(url, "transactions")
        try:
            await http.refresh(LISTING_SECONDS)
        finally:
            await http.aclose()

    asyncio.run(ask())


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print an answer: as JSON, or field by field."""
    if as_json:
        say_json(result)
    else:
        say_record(result)


def watched(every: float, look: Callable[[], None]) -> None:
    """Call `look` once if `every` is 0; otherwise at this interval in seconds until Ctrl-C, on a cleared terminal."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if every and is_terminal():
                console().clear()
            look()
            if not every:
                return
            time.sleep(every)


Columns = Mapping[str, Callable[[dict[str, Any]], Any]]
"""The columns of a list: the heading, and the function that gets a row's value. The first column identifies the row."""


def show_rows(result: dict[str, Any], as_json: bool, rows: str, columns: Columns, wide: bool = False) -> None:
    """Print the list `rows` of an answer: as JSON, as a table on a terminal, or with tabs for other programs.

    `wide`: print every field of the rows instead of `columns`.
    """
    if as_json:
        say_json(result)
        return
    items = result[rows]
    if wide and items:
        columns = {name: itemgetter(name) for name in items[0]}
    if not is_terminal():
        say_fields(columns)
        for row in items:
            say_fields(value(row) for value in columns.values())
        return
    if not items:
        say(f"no {rows.replace('_', ' ')}")
        return
    say_table(
        [name.replace("_", " ") for name in columns], [[value(row) for value in columns.values()] for row in items]
    )


def show_first(
    result: dict[str, Any], as_json: bool, rows: str, columns: Columns, wide: bool = False, noun: str = ""
) -> None:
    """Like `show_rows`, for an answer with the first rows only: it says how many there are (`of`), if there are more.

    `noun`: the name of the rows for people; by default `rows`.
    """
    show_rows(result, as_json, rows, columns, wide)
    if not as_json and result["of"] > len(result[rows]):
        say(f"{len(result[rows]):,} of {result['of']:,} {noun or rows}; see --max", err=True)


def fields(*names: str) -> Columns:
    """Columns that show the fields with these names unchanged."""
    return {name: itemgetter(name) for name in names}


def place_of(message: dict[str, Any]) -> str:
    """A message's topic, queue and offset, and the one of several logs that it is in."""
    place = f"{message['topic']}/{message['queue']}@{message['offset']}"
    return f"{place} {message['worker']}" if message.get("worker") else place


def seconds(instant: str | None) -> str:
    """An instant to the second."""
    return "-" if not instant else instant[:19] + "Z"


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """The names and values of texts like NAME=VALUE. Raises BadParameter."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
        values[name] = value
    return values


def place(text: str) -> str | int:
    """An offset as a number; other text unchanged."""
    offset = digits(text)
    return text if offset is None else offset
