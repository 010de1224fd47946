"""`notify audit run --results URL`: results of audits as tables that outlive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from notify.spark.result import Result

RESULTS = typer.Option(
    "", "--results", envvar="NOTIFY_AUDIT_RESULTS",
    help="Merge findings, buckets and state into tables at this URL (a directory, s3://bucket/prefix and so on).",
)  # fmt: skip


def keep(result: Result, url: str, tell: Callable[[str], object]) -> None:
    """Merge the results into the tables at a URL. Raises InvalidRequest, ObjectStoreFailed."""
    from notify.spark.report.results import merge

    tell(f"merging the results into {url}")
    counts = merge(result, url)
    tell("; ".join(f"{name}: {count:,} rows" for name, count in counts.items()))
