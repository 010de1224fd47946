"""`notify audit --results URL`: merges the results of audits into tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from notify.spark.judge.continue_from import Proved
    from notify.spark.result import Inputs, Plan, Result

RESULTS = typer.Option(
    "", "--results", envvar="NOTIFY_AUDIT_RESULTS",
    help="Merge findings, buckets and state into tables at this URL (a directory, s3://bucket/prefix and so on).",
)  # fmt: skip


def keep(result: Result, url: str, tell: Callable[[str], object]) -> None:
    """Merge the results into the tables at a URL, if there is one. Raises InvalidRequest, ObjectStoreFailed."""
    if not url:
        return
    from notify.spark.report.results import merge

    tell(f"merging the results into {url}")
    counts = merge(result, url)
    tell("; ".join(f"{name}: {count:,} rows" for name, count in counts.items()))


def concluded(report: Path, plan: Plan, inputs: Inputs, result: Result, before: Proved | None) -> Path:
    """Note what is proved, write the report, and return the path of its page. Call this only once the results are
    merged, because the next audit does not read proved data again."""
    from notify.spark.judge import continue_from
    from notify.spark.report.files import write

    continue_from.conclude(report, plan, inputs, result, before)
    return write(result, report)
