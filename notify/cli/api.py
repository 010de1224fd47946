"""Requests to a server's admin routes, and how every command prints what it got."""

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

URL = typer.Option("http://127.0.0.1:7400", envvar="NOTIFY_URL", help="The server. [env: NOTIFY_URL]")
AS_JSON = typer.Option(False, "--json", envvar="NOTIFY_JSON", help="One JSON object on stdout, nothing else.")
REASON = typer.Option(..., "--reason", envvar="NOTIFY_REASON", help="Why; it is recorded with who did it.")
DRY_RUN = typer.Option(False, "--dry-run", envvar="NOTIFY_DRY_RUN", help="Only say what would be done.")


def call(url: str, method: str, *parts: str, query: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One admin request. Raises NotifyError with what the server says."""

    async def ask() -> bytes:
        http = Servers(url, "transactions" if parts[0] == "transactions" else "queue")
        try:
            if parts[0] != "transactions":
                # The address may be of a server without queues: then it knows who has them.
                await http.refresh()
            path = "/v1/admin/" + "/".join(quote(part, safe="") for part in parts) + query
            data = msgspec.json.encode(body) if body is not None else b""
            return await http.call(method, path, data, 60, JSON)
        finally:
            await http.aclose()

    found: dict[str, Any] = msgspec.json.decode(asyncio.run(ask()))
    return found


def write(reason: str, dry_run: bool, **fields: Any) -> dict[str, Any]:
    """The body of a write; the reason names the user too."""
    return {"reason": f"{reason} ({getpass.getuser()})", "dry_run": dry_run} | fields


def show(result: dict[str, Any], as_json: bool, rows: str | None = None) -> None:
    """Print an answer: as JSON, as a table of its list `rows`, or field by field."""
    if as_json:
        say_json(result)
        return
    if rows is not None:
        found = result[rows]
        if not found:
            say(f"no {rows.replace('_', ' ')}")
            return
        table = Rows(*found[0].keys())
        for row in found:
            table.add_row(*row.values())
    else:
        table = Rows(show_header=False)
        for name, value in result.items():
            table.add_row(name, value)
    console().print(table)
