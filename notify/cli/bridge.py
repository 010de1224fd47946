"""`notify bridge`: moves messages from binlogs of MySQL and MariaDB to a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from datetime import datetime
from typing import Any

import typer

from notify.cli.api import AS_JSON, URL
from notify.cli.database import SCHEMA, SCHEMAS
from notify.cli.printed import say, say_json
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.wire import microseconds
from notify.runtime.signals import run_until_signal


def register(app: typer.Typer) -> None:
    app.command()(bridge)


def bridge(
    dsn: list[str] = typer.Option(
        ...,
        "--dsn",
        envvar="NOTIFY_DSN",
        help="A database as `name=URL` (repeatable, one source each). The same name again names a replica, used "
        "when the first database fails. The default name is the database's source id. [env: NOTIFY_DSN]",
    ),
    url: str = URL,
    schema: str | None = SCHEMA,
    schemas: str | None = SCHEMAS,
    server_id: int = typer.Option(0, min=0, help="The server id as a replica; default: made from the source's name."),
    backfill: bool = typer.Option(
        False, "--backfill", help="First take from the tables what was not moved yet; then continue from now."
    ),
    backfill_from: str = typer.Option(
        "",
        "--backfill-from",
        help="Backfill from this instant on (RFC 3339), instead of from the queue's newest message; required for "
        "Kafka, which takes messages after this instant again.",
    ),
    once: bool = typer.Option(False, "--once", help="Stop when all present transactions are moved."),
    as_json: bool = AS_JSON,
) -> None:
    """Move committed messages from binlogs to a queue server, exactly once and in commit order."""
    from notify.binlog_bridge.pump import Bridge
    from notify.binlog_bridge.totals import describe
    from notify.movers.sinks.sink import running_beside

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    since_us = _instant_us(backfill_from) if backfill_from else None
    sources = by_name(dsn)
    if server_id and len(sources) > 1:
        raise InvalidRequest("--server-id works with one source only: leave it out, and each source gets a separate id")
    bridges = [
        Bridge(urls, url, name=name, server_id=server_id, schema=schema, schemas=schemas)
        for name, urls in sources.items()
    ]
    bad: list[str] = []

    async def move(moving: Bridge) -> None:
        try:
            await moving.run(once=once, fill=backfill or since_us is not None, fill_since_us=since_us)
        except Exception as error:
            text = str(error)
            if not isinstance(error, NotifyError):
                logging.getLogger("notify.bridge").exception("an unexpected error ended the bridge of a source")
                text = f"an unexpected error ended it: {error!r}"
            bad.append(f"source {moving.name or '(not reached yet)'}: {text}")
            say(f"notify: {bad[-1]}", err=True)

    with running_beside(url):
        run_until_signal(lambda: _all(map(move, bridges)))
    done = {"sources": {moving.name: describe(moving.totals) for moving in bridges}, "stopped": bad}
    if as_json:
        say_json(done)
    else:
        for name, totals in done["sources"].items():  # type: ignore[attr-defined]
            source = name or "a source that was not reached"
            say(f"{source}: {totals['rows']} messages, {totals['stored']} transactions stored")
    raise typer.Exit(1 if bad else 0)


def by_name(dsn: list[str]) -> dict[str, list[str]]:
    """The databases of each source, by the source's name; "" without a name."""
    sources: dict[str, list[str]] = {}
    for text in dsn:
        name, equals, address = text.partition("=")
        if not equals or ":" in name:
            name, address = "", text
        sources.setdefault(name, []).append(address)
    return sources


async def _all(moves: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*moves, return_exceptions=True)


def _instant_us(text: str) -> int:
    """Microseconds since 1970. Raises InvalidRequest."""
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidRequest(f"--backfill-from {text!r} is no instant: write 2026-11-21T08:00:00Z") from None
