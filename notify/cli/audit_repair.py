"""`notify audit run --plan FILE` and `--repair FILE`: writes the plan of an audit's repairs, and carries a plan out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from notify.admin_api.actor import signed
from notify.cli.printed import say, say_json
from notify.errors import InvalidRequest

if TYPE_CHECKING:
    from notify.spark.result import Inputs, Result

PLAN = typer.Option(
    None, "--plan", help="Write what a repair would do to this file, each item with its evidence; change nothing."
)
REPAIR = typer.Option(None, "--repair", help="Carry out exactly this plan through the server, without another audit.")
FORCE = typer.Option(False, "--force", help="Plan, or repair, even if an input may be missing.")
REASON = typer.Option(
    "repair after an audit", "--reason", help="Why you repair; the server records it with each repair."
)

DONE = (200, 201)
"""The statuses of an item that is done, or in a dry run would be done."""


def check_files(plan: Path | None, repair: Path | None) -> None:
    """Raises InvalidRequest if both files are given, or if a plan would be overwritten."""
    if plan is not None and repair is not None:
        raise InvalidRequest("--plan writes a new file, and --repair carries one out: give one of them")
    if plan is not None and plan.exists():
        raise InvalidRequest(f"--plan {plan} exists: name a file that does not exist, or carry it out with --repair")


def write_plan(result: Result, inputs: Inputs, path: Path, effects: Sequence[tuple[str, str]], *, force: bool) -> str:
    """Write the plan of a result's repairs; returns a sentence that summarizes it. Raises InvalidRequest."""
    from notify.spark.repair.journal import done_beside
    from notify.spark.repair.planning import plan_of

    plan = plan_of(result, inputs, effects=effects, force=force, done=done_beside(path))
    plan.write(path)
    sentence = f"plan: {len(plan.items):,} repairs, {len(plan.held_back):,} findings held back: {path}"
    return "; ".join([sentence, *plan.doubts[:1], *plan.needs_force])


def carry_out(
    inputs: Inputs,
    path: Path,
    url: str,
    reason: str,
    effects: Sequence[tuple[str, str]],
    *,
    scratch: str,
    force: bool,
    dry_run: bool,
) -> Any:
    """Carry out a plan; returns a row for each item. Raises InvalidRequest, Conflict, Unavailable."""
    from notify.spark.repair.carrying_out import Repair
    from notify.spark.repair.plan import read_plan

    plan = read_plan(path)
    plan.check_force(force=force)
    repair = Repair(inputs, url, signed(reason), scratch, effects=effects, force=force)
    return asyncio.run(repair.run(plan, path, dry_run=dry_run))


def show(rows: list[dict[str, Any]], *, as_json: bool, dry_run: bool) -> int:
    """Print the result, or in a dry run the expected result, of each item. Returns the exit code: 0 if all items are
    done, or would be, else 1."""
    not_done = [row for row in rows if row["status"] not in DONE]
    count = len(rows) - len(not_done)
    if as_json:
        done = {"dry_run": dry_run, "would_do": count if dry_run else 0, "done": 0 if dry_run else count}
        say_json({"repairs": rows, **done, "left": len(not_done), "summary": summary(rows, dry_run=dry_run)})
    else:
        for row in rows:
            say(f"{row['finding']} {row['message_id']}: {_result_of(row, dry_run=dry_run)}")
        say(summary(rows, dry_run=dry_run))
    return 1 if not_done else 0


def summary(rows: list[dict[str, Any]], *, dry_run: bool) -> str:
    """One sentence about everything that was done, or would be done."""
    done = [row for row in rows if row["status"] in DONE]
    before = sum(1 for row in done if row["was_before"])
    counts = Counter((row["action"], row["group"]) for row in done if not row["was_before"])
    parts = [_ACTIONS[action][dry_run].format(n=_number(n), group=group) for (action, group), n in counts.items()]
    if before:
        parts.append(f"{_number(before)} had been repaired before")
    if held := len(rows) - len(done):
        were = "would be" if dry_run else "was" if held == 1 else "were"
        parts.append(f"{_number(held)} {were} held back or refused")
    text = "; ".join(parts) or ("would do nothing" if dry_run else "did nothing")
    return f"{text}. A dry run: nothing was changed" if dry_run else text


_ACTIONS = {
    "republish": ("published {n} again", "would publish {n} again"),
    "redeliver": ("sent {n} to group {group} again", "would send {n} to group {group} again"),
    "decide": ("recorded the outcome of {n}", "would record the outcome of {n}"),
}
"""For each action, the words for what it did and for what it would do."""


def _number(count: int) -> str:
    return f"{count:,} message" + ("" if count == 1 else "s")


def _result_of(row: dict[str, Any], *, dry_run: bool) -> str:
    """The result of one item in words."""
    if row["status"] not in DONE:
        status = "held back" if row["status"] == 0 else f"refused ({row['status']})"
        return f"{'would be ' if dry_run else ''}{status}: {row['detail']}; it was to {row['what']}"
    if row["was_before"]:
        return f"nothing to do, {row['detail']}" + (f": {row['as']}" if row["as"] else "")
    as_what = f", as {row['as']}" if row["as"] else ""
    detail = f" ({row['detail']})" if row["detail"] else ""
    return f"{'would' if dry_run else 'done:'} {row['what']}{as_what}{detail}"
