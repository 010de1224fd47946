"""Requests to a server's admin routes, and the printing of their answers."""

from __future__ import annotations

import asyncio
import getpass
from typing import Any
from urllib.parse import quote

import msgspec
import typer

from notify.cli.printed import Rows, console, say, say_json
from notify.client.servers import Servers
from notify.wire import JSON

URL = typer.Option("http://127.0.0.1:7400", envvar="NOTIFY_URL", help="The server's address. [env: NOTIFY_URL]")
AS_JSON = typer.Option(False, "--json", envvar="NOTIFY_JSON", help="Print one JSON object on stdout, and nothing else.")
REASON = typer.Option(..., "--reason", envvar="NOTIFY_REASON", help="Why you do this; it is recorded with your name.")
DRY_RUN = typer.Option(
    False, "--dry-run", envvar="NOTIFY_DRY_RUN", help="Change nothing; only show what would be done."
)

REPLAY_EFFECTS = typer.Option(
    False,
    "--replay-effects",
    help="Repeat the effects of handlers with an Inbox; without this they skip messages that they handled.",
)
BEFORE_INBOX = typer.Option(
    False, "--force", help="Do it although the inbox rows of some of these messages may be purged."
)
BEFORE = "latest (all messages), an instant (RFC 3339), or an offset if the topic has one queue."


def call(url: str, method: str, *parts: str, query: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Make one admin request. Raises NotifyError with the server's error."""

    async def ask() -> bytes:
        http = Servers(url, "transactions" if parts[0] == "transactions" else "queue")
        try:
            if parts[0] != "transactions":
                # The address may be that of a server without queues, which knows the servers that have them.
                await http.refresh()
            path = "/v1/admin/" + "/".join(quote(part, safe="") for part in parts) + query
            data = msgspec.json.encode(body) if body is not None else b""
            return await http.call(method, path, data, 60, JSON)
        finally:
            await http.aclose()

    answer: dict[str, Any] = msgspec.json.decode(asyncio.run(ask()))
    return answer


def write(reason: str, dry_run: bool, **fields: Any) -> dict[str, Any]:
    """The body of a write; the user's name is added to the reason."""
    return {"reason": f"{reason} ({getpass.getuser()})", "dry_run": dry_run} | fields


def show(result: dict[str, Any], as_json: bool, rows: str | None = None) -> None:
    """Print an answer: as JSON, as a table of its list `rows`, or field by field."""
    if as_json:
        say_json(result)
        return
    if rows is not None:
        items = result[rows]
        if not items:
            say(f"no {rows.replace('_', ' ')}")
            return
        table = Rows(*items[0].keys())
        for row in items:
            table.add_row(*row.values())
    else:
        table = Rows(show_header=False)
        for name, value in result.items():
            table.add_row(name, value)
    console().print(table)


def given(**flags: bool) -> dict[str, bool]:
    """Only the flags that are set, because an older server refuses fields that it does not know."""
    return {name: True for name, value in flags.items() if value}


def place(text: str) -> str | int:
    """An offset as a number; other text unchanged."""
    return int(text) if text.isdigit() else text
