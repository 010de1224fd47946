"""`notify job`: a server's jobs, and waiting for their ends."""

from __future__ import annotations

import time
from typing import Any

import typer

from notify.admin_api import server
from notify.admin_api.declaration import AdminWrite
from notify.cli.api import AS_JSON, URL, WATCH, call, fields, show, show_rows, watched
from notify.cli.printed import progress
from notify.cli.writes import add_write, show_write

FOLLOW_SECONDS = 0.2
group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_jobs(
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
    watch: float = WATCH,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List the newest jobs."""
    columns = fields("id", "what", "target", "state", "done", "failed")
    watched(watch, lambda: show_rows(call(url, "GET", "jobs", query=f"?max={max}"), as_json, "jobs", columns))


@group.command("show")
def show_job(
    number: int,
    offset: int = typer.Option(0, min=0, help="The number of the first item to show."),
    max: int = typer.Option(100, min=1, max=10_000, help="Show at most this many."),
    watch: float = WATCH,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Show a job's progress and the results of its items."""
    query = f"?offset={offset}&max={max}"
    watched(watch, lambda: show(call(url, "GET", "jobs", str(number), query=query), as_json))


add_write(group, "cancel", server.JOB_CANCEL, "Cancel a job. Finished items stay as they are.", number=int)


def to_the_end(write: AdminWrite, url: str, answer: dict[str, Any], as_json: bool, *, here: bool = False) -> None:
    """Show the answer of a write; if it is a job, wait for its end and show the result. Exits with code 1 if a
    part failed.

    `here`: whether the server at `url` has the job, even if it has no queues.
    """
    job = answer["result"].get("job")
    if job is None:
        show_write(write.name, answer, as_json)
        if any((item.get("status") or 0) >= 400 for item in answer["result"].get("items") or ()):
            raise typer.Exit(1)
        return
    numbers = answer["result"].get("jobs") or [job]  # one job for each worker
    ended = [followed(url, number, as_json, here=here) for number in numbers]
    show(ended[0] if len(ended) == 1 else {"jobs": ended}, as_json)
    if any(each["state"] != "done" or each["failed"] for each in ended):
        raise typer.Exit(1)


def followed(url: str, number: int, as_json: bool, *, here: bool = False) -> dict[str, Any]:
    """Wait for the end of a job, show its progress, and return the job."""
    with progress(as_json, transient=False) as shown:
        bar = shown.add_task(f"job {number}", total=1.0)
        while (job := call(url, "GET", "jobs", str(number), here=here))["state"] == "running":
            shown.update(bar, completed=job["progress"])
            time.sleep(FOLLOW_SECONDS)
        shown.update(bar, completed=job["progress"])
    return job
