"""`notify bridge`: moves messages from binlogs of MySQL and MariaDB to a queue."""

from __future__ import annotations

import asyncio
import logging
import signal

import typer

from notify.cli.api import AS_JSON, URL
from notify.cli.printed import say, say_json
from notify.errors import InvalidRequest, NotifyError


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
    server_id: int = typer.Option(0, min=0, help="The server id as a replica; default: made from the source's name."),
    backfill: bool = typer.Option(
        False, "--backfill", help="First take from the tables what the binlog no longer has; then continue from now."
    ),
    once: bool = typer.Option(False, "--once", help="Stop when all present transactions are moved."),
    as_json: bool = AS_JSON,
) -> None:
    """Move committed messages from binlogs to a queue server, exactly once and in commit order."""
    from notify.binlog_bridge.pump import Bridge, describe
    from notify.sinks.sink import delays_released

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    sources: dict[str, list[str]] = {}
    for text in dsn:
        name, equals, address = text.partition("=")
        if not equals or ":" in name:
            name, address = "", text
        sources.setdefault(name, []).append(address)
    if server_id and len(sources) > 1:
        raise InvalidRequest(
            "--server-id works with one source only: leave it out, and each source gets an id of its own"
        )
    bridges = [Bridge(urls, url, name=name, server_id=server_id) for name, urls in sources.items()]
    bad: list[str] = []

    async def move(moving: Bridge) -> None:
        try:
            await moving.run(once=once, fill=backfill)
        except NotifyError as error:
            bad.append(f"source {moving.name or '(not reached yet)'}: {error}")
            say(f"notify: {bad[-1]}", err=True)

    async def run() -> None:
        tasks = [asyncio.ensure_future(move(moving)) for moving in bridges]
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: [task.cancel() for task in tasks])
        await asyncio.gather(*tasks, return_exceptions=True)

    with delays_released(url):
        asyncio.run(run())
    done = {"sources": {moving.name: describe(moving.totals) for moving in bridges}, "stopped": bad}
    if as_json:
        say_json(done)
    else:
        for name, totals in done["sources"].items():  # type: ignore[attr-defined]
            say(f"{name}: {totals['rows']} messages, {totals['stored']} transactions stored")
    raise typer.Exit(1 if bad else 0)
