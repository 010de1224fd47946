"""`notify audit run --plan FILE` and `--repair FILE`: what an audit would repair, for people, and carrying that out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from notify.cli.printed import say, say_json

if TYPE_CHECKING:
    from notify.spark.result import Inputs, Result

PLAN = typer.Option(
    None, "--plan", help="Write what a repair would do to this file, each item with its evidence; change nothing."
)
REPAIR = typer.Option(None, "--repair", help="Carry out exactly this plan through the server, without another audit.")
FORCE = typer.Option(False, "--force", help="Plan, or repair, although an input may be missing.")
REASON = typer.Option(
    "repair after an audit", "--reason", help="Why you repair; the server records it with each repair."
)


def write_plan(result: Result, inputs: Inputs, path: Path, *, force: bool) -> str:
    """Write the plan of a result's repairs; a sentence that says what it holds. Raises InvalidRequest."""
    from notify.spark.repair.planning import plan_of

    plan = plan_of(result, inputs, force=force)
    plan.write(path)
    sentence = f"plan: {len(plan.items):,} repairs, {len(plan.held_back):,} findings held back: {path}"
    return "; ".join([sentence, *plan.doubts[:1], *plan.needs_force])


def carry_out(inputs: Inputs, path: Path, url: str, reason: str, *, scratch: Path, force: bool, dry_run: bool) -> Any:
    """Carry out a plan; a row for each of its items. Raises InvalidRequest, Conflict, Unavailable."""
    from notify.spark.repair.carrying_out import Repair
    from notify.spark.repair.plan import read_plan

    plan = read_plan(path)
    plan.check_force(force=force)
    return asyncio.run(Repair(inputs, url, reason, scratch).run(plan, path, dry_run=dry_run))


def show(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print what came of the items; the exit code: 0 if all are done, else 1."""
    left = [row for row in rows if row["status"] not in (200, 201)]
    if as_json:
        say_json({"repairs": rows, "done": len(rows) - len(left), "left": len(left)})
    else:
        for row in rows:
            as_what = f" as {row['as']}" if row["as"] else ""
            status = "held back" if row["status"] == 0 else row["status"]
            say(f"{row['finding']} {row['message_id']}: {row['what']}{as_what}: {status} {row['detail']}".rstrip())
        would = "would be " if rows and rows[0]["dry_run"] else ""
        say(f"{len(rows) - len(left):,} of {len(rows):,} {would}repaired; {len(left):,} left")
    return 1 if left else 0
