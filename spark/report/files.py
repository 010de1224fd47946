"""Writes a report: report.html, report.json, findings.parquet and buckets.parquet in one directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from notify.spark.judge.findings import BY_NAME
from notify.spark.report.page import page
from notify.spark.result import Found, Result

FINDINGS = pa.schema(
    [
        ("finding", pa.string()),
        ("key", pa.string()),
        ("message_id", pa.string()),
        ("at_us", pa.int64()),
        ("detail", pa.string()),
        ("topic", pa.string()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("producer_group", pa.string()),
        ("consumer_groups", pa.list_(pa.string())),
        ("database", pa.string()),
        ("log", pa.string()),
        ("repair", pa.string()),
        ("evidence", pa.string()),  # JSON
    ]
)
_NOT_TOLD = ("found", "buckets", "latencies", "commit_to_ack", "logs", "bad", "producer_groups")
IN_JSON = 1000
"""The most findings in report.json; findings.parquet has all."""


def row_of(case: Found) -> dict[str, Any]:
    """A finding as plain values."""
    return {
        "finding": case.finding,
        "key": case.key,
        "message_id": case.message_id,
        "at_us": case.at_us,
        "detail": case.detail,
        "topic": case.topic,
        "queue": case.queue,
        "offset": case.offset,
        "producer_group": case.producer_group,
        "consumer_groups": case.groups,
        "database": case.database,
        "log": case.log,
        "repair": BY_NAME[case.finding].repair,
        "evidence": case.evidence,
    }


def plain(result: Result) -> dict[str, Any]:
    """The result without the data of its plots, as in report.json and `--json`."""
    # Not all of it as plain values: findings, figures and the files of logs are many.
    told = {each.name: getattr(result, each.name) for each in fields(Result) if each.name not in _NOT_TOLD}
    completeness = result.completeness
    return told | {
        "coverage": [asdict(line) for line in result.coverage],
        "causes": [asdict(cause) for cause in result.causes],
        "completeness": None if completeness is None else completeness.plain(),
        "latency": result.latency,
        "inconclusive": bool(result.reasons),
        "exit_code": result.exit_code,
        "findings": [row_of(f) for f in result.found[:IN_JSON]],
    }


def write(result: Result, directory: Path) -> Path:
    """Write the four files, each under a temporary name first. Returns the path of report.html."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [row_of(f) for f in result.found]
    for row in rows:
        row["evidence"] = json.dumps(row["evidence"])
    _replace(directory / "findings.parquet", lambda path: pq.write_table(pa.Table.from_pylist(rows, FINDINGS), path))
    buckets = pa.Table.from_pylist(result.buckets) if result.buckets else pa.table({"at_us": pa.array([], pa.int64())})
    _replace(directory / "buckets.parquet", lambda path: pq.write_table(buckets, path))
    _replace(directory / "report.json", lambda path: path.write_text(json.dumps(plain(result), indent=1)))
    _replace(directory / "report.html", lambda path: path.write_text(page(result), encoding="utf-8"))
    return directory / "report.html"


def _replace(path: Path, write_to: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_to(temporary)
    temporary.rename(path)
