"""`notify limit`: shows and changes the rates of topics and groups while servers run."""

from __future__ import annotations

from typing import Any

import typer

from notify.admin_api import server
from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, show
from notify.cli.writes import send_write, show_write, write_body

group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_limits(url: str = URL, as_json: bool = AS_JSON) -> None:
    """List limits by name, in messages or transactions per second; other names have no limit."""
    show(call(url, "GET", "limits"), as_json)


@group.command("set")
def set_limits(
    topic: list[str] = typer.Option([], help="TOPIC=RATE, messages per second (repeatable)."),
    producer_group: list[str] = typer.Option([], help="GROUP=RATE, transactions per second (repeatable)."),
    consumer_group: list[str] = typer.Option([], help="GROUP=RATE, messages per second (repeatable)."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Change limits; `NAME=` removes one, and others stay."""
    if not (topic or producer_group or consumer_group):
        raise typer.BadParameter("say what to change: --topic, --producer-group or --consumer-group")
    limits: dict[str, dict[str, Any]] = call(url, "GET", "limits")
    for kind, changes in (
        ("topics", topic),
        ("producer_groups", producer_group),
        ("consumer_groups", consumer_group),
    ):
        for change in changes:
            name, equals, rate = change.partition("=")
            if not equals:
                raise typer.BadParameter(f"{change!r} is not NAME=RATE")
            if rate:
                limits[kind][name] = _rate(rate)
            else:
                limits[kind].pop(name, None)
    answer = send_write(server.LIMITS_PUT, url, body=write_body(reason, dry_run, **limits))
    show_write(server.LIMITS_PUT.name, answer, as_json)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a rate: write NAME=RATE, a number per second, or NAME=") from None
