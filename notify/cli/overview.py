"""`notify top`, `overview`, `node`, `audit-log`: the system's figures and alarms, its members, and who did what."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Group
from rich.live import Live

from notify.cli.api import AS_JSON, URL, WATCH, WIDE, call, fields, show_rows, watched
from notify.cli.printed import Rows, cell, console, is_terminal, latency, say_json

nodes = typer.Typer(no_args_is_help=True)


@nodes.command("list")
def list_nodes(wide: bool = WIDE, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List servers, bridges, relays and consumers."""
    columns = fields("name", "kind", "url", "roles", "age")
    show_rows(call(url, "GET", "nodes"), as_json, "members", columns, wide)


@nodes.command("bridges")
def list_bridges(wide: bool = WIDE, watch: float = WATCH, url: str = URL, as_json: bool = AS_JSON) -> None:
    """List every bridged source: position, lag, and how long its bridge has been silent."""
    columns = fields("source", "lag_seconds", "silent_seconds", "refused", "position")
    watched(watch, lambda: show_rows(call(url, "GET", "bridges"), as_json, "bridges", columns, wide))


def list_actions(
    max: int = typer.Option(20, min=1, max=10_000, help="Show at most this many."),
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List the newest administrative writes, with author and reason."""
    columns = fields("at", "who", "what", "target", "reason")
    show_rows(call(url, "GET", "actions", query=f"?max={max}"), as_json, "actions", columns)


def overview(url: str = URL, as_json: bool = AS_JSON) -> None:
    """Show rates, transactions in doubt, lag and alarms. Exit code 1 if there is an alarm that is not silenced."""
    figures = call(url, "GET", "overview")
    if as_json:
        say_json(figures)
    else:
        console().print(screen_of(figures))
    raise typer.Exit(1 if heard(figures) else 0)


def top(
    interval: float = typer.Option(1.0, min=0.2, max=60, help="Seconds between two updates."),
    rounds: int = typer.Option(0, min=0, help="Stop after this number of updates; 0: at Ctrl-C."),
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Show the overview and the busiest groups and topics continuously; with --json, print one line for each update."""
    done = 0
    if as_json:
        while not rounds or done < rounds:
            say_json(call(url, "GET", "overview"))
            done += 1
            time.sleep(interval if done != rounds else 0)
        return
    rates = _Rates()

    def look() -> Group:
        figures = call(url, "GET", "overview")
        return Group(screen_of(figures, lagging=False), *_queues(url, figures, rates))

    if not is_terminal():  # a log or a pipe gets every update, at once
        while True:
            console().print(look())
            done += 1
            if done == rounds:
                return
            sys.stdout.flush()
            time.sleep(interval)
    with Live(Group(), console=console(), screen=rounds == 0, auto_refresh=False) as live:
        try:
            while not rounds or done < rounds:
                live.update(look(), refresh=True)
                done += 1
                time.sleep(interval if done != rounds else 0)
        except KeyboardInterrupt:
            return


def heard(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The alarms that are not silenced."""
    return [alarm for alarm in figures["alarms"] if not alarm.get("silence")]


ROWS = 10
"""How many groups and topics `top` shows."""
LISTED = 1000
"""The first groups and topics by name, from which `top` chooses."""


class _Rates:
    """The messages per second that each topic gets, by its ends in two updates."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ends: dict[str, int] = {}
        self._at = 0.0

    def of(self, ends: dict[str, int]) -> dict[str, float]:
        now = self._monotonic()
        passed, self._at = now - self._at, now
        before, self._ends = self._ends, ends
        return {name: max(0, end - before.get(name, end)) / passed for name, end in ends.items()}


def _queues(url: str, figures: dict[str, Any], rates: _Rates) -> list[Any]:
    """The groups with the largest lags, and the topics that get most messages; none where no server has queues."""
    if figures["queues"] is None:
        return []
    ages = {row["name"]: row["oldest_seconds"] for row in figures["queues"]["lagging"]}
    groups = Rows(
        "group", "lag", "oldest", "leased", "consumers", "p50", "p99", "handler p99", "", box=None, pad_edge=False
    )
    listed = call(url, "GET", "groups", query=f"?max={LISTED}")["groups"]
    for row in sorted(listed, key=lambda row: -row["lag"])[:ROWS]:
        age = "-" if ages.get(row["name"]) is None else f"{ages[row['name']]:.0f} s"
        state = "paused" if row["paused"] else ""
        acked, handled = _lately(row, "commit_to_ack"), _lately(row, "handler")
        times = latency(acked.get("p50")), latency(acked.get("p99")), latency(handled.get("p99"))
        groups.add_row(row["name"], f"{row['lag']:,}", age, row["leased"], row["consumers"], *times, state)
    topics = Rows("topic", "messages/s", "messages", "queues", "p50", "p99", box=None, pad_edge=False)
    answer = call(url, "GET", "topics", query=f"?max={LISTED}&internal=false")
    rows = {topic["name"]: topic for topic in answer["topics"]}
    found = {name: topic["queues"] for name, topic in rows.items()}
    per_second = rates.of({name: sum(q["end"] for q in queues) for name, queues in found.items()})
    kept = {name: sum(q["end"] - q["start"] for q in queues) for name, queues in found.items()}
    for name in sorted(found, key=lambda name: (-per_second[name], -kept[name]))[:ROWS]:
        placed = _lately(rows[name], "commit_to_queue")
        ways = latency(placed.get("p50")), latency(placed.get("p99"))
        queues = len({q["queue"] for q in found[name]})
        topics.add_row(name, f"{per_second[name]:,.0f}", f"{kept[name]:,}", queues, *ways)
    return [table for table in (groups, topics) if table.row_count]


def _lately(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """The figures of one kind of latency; empty where a server does not measure it."""
    figures: dict[str, Any] = row.get("latency", {}).get(kind) or {}
    return figures


def screen_of(figures: dict[str, Any], *, lagging: bool = True) -> Group:
    rates, doubt, queues = figures["rates"], figures["in_doubt"], figures["queues"]
    facts = Rows(show_header=False, box=None, pad_edge=False)
    facts.add_row("halves", f"{rates['halves']:,.0f}/s", "committed", f"{rates['committed']:,.0f}/s")
    oldest = "-" if doubt["oldest_seconds"] is None else f"oldest {doubt['oldest_seconds']:.0f} s"
    facts.add_row("in doubt", f"{doubt['count']:,} {oldest}", "parked", f"{figures['parked']['count']:,}")
    if figures.get("queues_away"):
        facts.add_row("groups", f"not shown: {figures['queues_away']}")
    if queues is not None and queues.get("leased", 0) is not None:  # over Kafka, consumers do not report their rates
        facts.add_row("delivered", f"{rates['delivered']:,.0f}/s", "acknowledged", f"{rates['acked']:,.0f}/s")
    if queues is not None:
        undelivered = queues["oldest_undelivered_seconds"]
        age = "" if undelivered is None else f" oldest {undelivered:.0f} s"
        facts.add_row("lag", f"{queues['lag']:,}{age}", "dead letters", f"{queues['dead_letters']:,}")
        facts.add_row("topics", f"{queues['topics']:,}", "groups", f"{queues['groups']:,}")
    if figures.get("shipping"):
        facts.add_row("shipping", _shipping(figures["shipping"]), "to", figures["shipping"]["to"])
    facts.add_row("disk", f"{figures['disk']['used_share']:.0%} full", "version", figures["version"])
    alarms = [cell(f"{a['text']} (since {a['since'][:19]})", "bold red") for a in heard(figures)]
    if silent := len(figures["alarms"]) - len(alarms):
        alarms.append(cell(f"{silent} silenced: notify alarm list"))
    parts: list[Any] = [
        cell(f"Notify {figures['at'][:19]}", "bold"),
        *(alarms or [cell("no alarms", "green")]),
        facts,
    ]
    if lagging and queues is not None and queues["lagging"]:
        table = Rows("group", "lag", "oldest", "", box=None, pad_edge=False)
        for row in queues["lagging"]:
            age = "-" if row["oldest_seconds"] is None else f"{row['oldest_seconds']:.0f} s"
            table.add_row(row["name"], f"{row['lag']:,}", age, "paused" if row["paused"] else "")
        parts.append(table)
    return Group(*parts)


def _shipping(shipping: dict[str, Any]) -> str:
    if shipping["refused"]:
        return "stopped"
    behind = shipping["behind"]
    text = f"{behind['seconds']:.0f} s, {behind['bytes']:,} bytes behind"
    return f"{text}, failing" if shipping["failing"] else text
