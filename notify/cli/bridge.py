"""`notify bridge`: moves messages from the logs of databases to a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any

import typer

from notify.admin_api.description import messages as of_messages
from notify.admin_api.description import transactions as of_transactions
from notify.cli.api import AS_JSON, DRY_RUN, URL
from notify.cli.database import SCHEMA, SCHEMAS, TRANSACTIONS_URL, opened
from notify.cli.printed import log_to_stderr, say, say_json
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.wire import microseconds
from notify.runtime.signals import run_until_signal


def bridge(
    dsn: list[str] = typer.Option(
        ...,
        "--dsn",
        envvar="NOTIFY_DSN",
        help="A database as `name=URL` (repeatable, one source each). The same name again names a replica, used "
        "when the first database fails. The default name is the database's source id. [env: NOTIFY_DSN]",
    ),
    url: str = URL,
    transactions_url: str = TRANSACTIONS_URL,
    schema: str | None = SCHEMA,
    schemas: str | None = SCHEMAS,
    server_id: int = typer.Option(
        0, min=0, help="The server id as a replica of MySQL or MariaDB; default: made from the source's name."
    ),
    backfill: bool = typer.Option(
        False, "--backfill", help="First take from the tables what was not moved yet; then continue from now."
    ),
    backfill_from: str = typer.Option(
        "",
        "--backfill-from",
        help="Backfill from this instant on (RFC 3339), instead of from the queue's newest message; required for "
        "Kafka, which takes messages after this instant again.",
    ),
    accept_unbounded_wal: bool = typer.Option(
        False,
        "--accept-unbounded-wal",
        envvar="NOTIFY_ACCEPT_UNBOUNDED_WAL",
        help="Read a PostgreSQL without max_slot_wal_keep_size: while the bridge is down, its log fills the disk. "
        "[env: NOTIFY_ACCEPT_UNBOUNDED_WAL]",
    ),
    drop_slot: bool = typer.Option(
        False,
        "--drop-slot",
        help="Remove a bridge on PostgreSQL: drop its slot and publications, and end. --dry-run shows them first.",
    ),
    dry_run: bool = DRY_RUN,
    once: bool = typer.Option(False, "--once", help="Stop once all is moved that was committed at the start."),
    as_json: bool = AS_JSON,
) -> None:
    """Move committed messages from databases' logs to a queue server, exactly once and in commit order, and send what
    producers in mode=auto have left behind there."""
    from notify.binlog_bridge.bridge import Bridge
    from notify.binlog_bridge.totals import describe
    from notify.movers.sinks.sink import running_beside
    from notify.runtime.alive import during

    log_to_stderr()
    since_us = _instant_us(backfill_from) if backfill_from else None
    sources = by_name(dsn)
    if server_id and len(sources) > 1:
        raise InvalidRequest("--server-id works with one source only: leave it out, and each source gets a separate id")
    if drop_slot:
        raise typer.Exit(_drop_slots(sources, schema, schemas, dry_run=dry_run, as_json=as_json))
    if dry_run:
        raise InvalidRequest("--dry-run goes with --drop-slot: a bridge that runs moves messages")
    bridges = [
        Bridge(
            urls,
            url,
            name=name,
            server_id=server_id,
            schema=schema,
            schemas=schemas,
            accept_unbounded_wal=accept_unbounded_wal,
            transactions_url=transactions_url,
        )
        for name, urls in sources.items()
    ]
    bad: list[str] = []

    async def move(moving: Bridge) -> None:
        try:
            await moving.run(once=once, fill=backfill or since_us is not None, fill_since_us=since_us)
        except Exception as error:
            text = str(error)
            if not isinstance(error, NotifyError):
                logging.getLogger("notify.binlog_bridge").exception("an unexpected error ended the bridge of a source")
                text = f"an unexpected error ended it: {error!r}"
            bad.append(f"source {moving.name or '(not reached yet)'}: {text}")
            say(f"notify: {bad[-1]}", err=True)

    with running_beside(url):
        run_until_signal(lambda: during(_all(map(move, bridges)), *(moving.progress for moving in bridges)))
    reached = {moving.name: moving.totals for moving in bridges if moving.name}  # `bad` has the others
    if as_json:
        say_json({"sources": {name: describe(totals) for name, totals in reached.items()}, "stopped": bad})
    else:
        for name, totals in reached.items():
            say(f"{name}: {of_messages(totals.rows)}, {of_transactions(totals.stored)} stored")
    raise typer.Exit(1 if bad else 0)


def _drop_slots(
    sources: Mapping[str, list[str]], schema: str | None, schemas: str | None, *, dry_run: bool, as_json: bool
) -> int:
    """Drop the slots of sources; the exit code: 1 if a source has none, or if something is left."""
    from notify.binlog_bridge.kinds import drop_slot

    by_slot: dict[str, list[dict[str, Any]]] = {}
    for name, urls in sources.items():
        for address in urls:
            with opened(address) as engine:
                kept = drop_slot(engine, name, schema, schemas, dry_run=dry_run)
                by_slot.setdefault(kept["slot"], []).append(kept)
    # A standby has no slot where the primary has one.
    found = [next((kept for kept in all_of_it if kept["found"]), all_of_it[0]) for all_of_it in by_slot.values()]
    if as_json:
        say_json({"slots": found, "dry_run": dry_run})
    else:
        for kept in found:
            say(_told(kept, dry_run))
    return 0 if all(kept["found"] and not kept["left"] for kept in found) else 1


def _told(kept: Mapping[str, Any], dry_run: bool) -> str:
    would = "would be dropped" if dry_run else "dropped"
    publications = "".join(f"; publication {name} {would}" for name in kept["publications"] if not kept["left"])
    if not kept["found"]:
        return f"{kept['slot']}: there is no such slot{publications}"
    size = f"{kept['retained_bytes'] >> 20:,} MB of the log were kept for it"
    left = f"; still to do, by their owner: {kept['left']}" if kept["left"] else ""
    return f"{kept['slot']}: {would}; {size}{publications}{left}"


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
        raise InvalidRequest(f"--backfill-from {text!r} is not a time: write 2026-11-21T08:00:00Z") from None
