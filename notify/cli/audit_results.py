"""The results of an audit: its report, and with `--results URL` tables that outlive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from notify.spark.result import Result

RESULTS = typer.Option(
    "", "--results", envvar="NOTIFY_AUDIT_RESULTS",
    help="Merge findings, buckets and state into tables at this URL (a directory, s3://bucket/prefix and so on).",
)  # fmt: skip


def keep(result: Result, report: Path, url: str, tell: Callable[[str], object]) -> Path:
    """Write the report into a directory, and merge the results into the tables at a URL, if there is one.

    The path of the report's page. Raises InvalidRequest, ObjectStoreFailed.
    """
    from notify.spark.report.files import write

    page = write(result, report)
    if url:
        from notify.spark.report.results import merge

        tell(f"merging the results into {url}")
        counts = merge(result, url)
        tell("; ".join(f"{name}: {count:,} rows" for name, count in counts.items()))
    return page
