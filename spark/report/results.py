"""Results of audits as tables that outlive them: findings, buckets and state, merged by key into one place.

    <url>/manifest.json, <url>/data/….parquet    see spark/tables

| table | key | a row |
|---|---|---|
| `findings` | `key` | a finding, and when audits saw it first and last; `resolved_us`: when it no longer applied |
| `buckets` | `at_us`, `topic` | the figures of a topic in a stretch of `seconds` from `at_us` on |
| `state` | `kind`, `name` | what the newest audit expected of an input, and read of it; of kind `audit`: its verdict |

Rows of `state` of kind `input` are the databases, storages and clusters by their ids: an audit without one is refused.
An audit replaces what it judged, and nothing else: what is older than its range, or than its inputs' oldest message,
stays as earlier audits left it. All three tables change in one step.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from notify.errors import InvalidRequest
from notify.object_store.store import Store
from notify.runtime.visible import first_of
from notify.spark.inputs.identities import lasting
from notify.spark.judge.measures import TOTALS
from notify.spark.report.files import FINDINGS, row_of
from notify.spark.result import Result
from notify.spark.tables import manifest as manifests
from notify.spark.tables.manifest import File, Manifest
from notify.spark.tables.reading import read_file

Row = dict[str, Any]
DAY_US = 86_400_000_000
UNDATED = "undated"
INPUT = "input"
"""The kind of the state's rows that say what the audits read: by identity, with the name that the newest one had."""
MOST_NAMED = 10
SEEN = [("first_seen_us", pa.int64()), ("last_seen_us", pa.int64()), ("resolved_us", pa.int64())]
FINDING_ROWS = pa.schema([*FINDINGS, *[pa.field(*each) for each in SEEN]])
STATE_ROWS = pa.schema(
    [("kind", pa.string()), ("name", pa.string()), ("expected", pa.string()), ("read", pa.string()),
     ("is_whole", pa.bool_()), ("from_us", pa.int64()), ("to_us", pa.int64()), ("audited_us", pa.int64())]
)  # fmt: skip


def merge(result: Result, url: str, now_us: int = 0) -> dict[str, int]:
    """Merge an audit's results into the tables at a URL; how many rows each table has then.

    `now_us`: the time to note, by default this machine's. Raises InvalidRequest for a URL that names no store, or has
    the results of audits with inputs that this one lacks, and ObjectStoreFailed; nothing has changed then.
    """
    store = Store(url)
    before = manifests.load(store)
    now_us = now_us or time.time_ns() // 1000
    tables = _Tables(store, before)
    _refuse_others(tables, result, url)
    since_us = result.from_us or min((bucket["at_us"] for bucket in result.buckets), default=result.to_us)
    _merge_findings(tables, result, since_us, now_us)
    _merge_buckets(tables, result, since_us)
    _merge_state(tables, result, now_us)
    manifests.replace(store, before, tables.merged())
    return tables.counts()


class _Tables:
    """The changed tables: the parts that change are read and written again."""

    def __init__(self, store: Store, before: Manifest) -> None:
        self._store = store
        self._before = before
        self._files = list(before.files)

    def parts(self, table: str) -> list[str]:
        return sorted({file.part for file in self._files if file.table == table})

    def change(self, table: str, part: str, schema: pa.Schema | None, change: Callable[[list[Row]], list[Row]]) -> None:
        """Write a part again with the rows that `change` returns. `schema`: None for the columns of the rows."""
        old = [file for file in self._files if (file.table, file.part) == (table, part)]
        rows = [row for file in old for row in read_file(self._store, file).to_pylist()]
        changed = change(list(rows))
        if changed == rows:
            return
        self._files = [file for file in self._files if file not in old]
        if changed:
            self._files.append(self._written(table, part, _table(changed, schema)))

    def _written(self, table: str, part: str, rows: pa.Table) -> File:
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, compression="zstd")
        data = memoryview(sink.getvalue())
        name = f"data/{time.time_ns() // 1000:016d}-{uuid.uuid4().hex}.parquet"
        size, sha256 = self._store.put(name, lambda file: file.write(data))
        return File(name, rows.num_rows, size, sha256, table, part)

    def merged(self) -> Manifest:
        return msgspec.structs.replace(self._before, files=tuple(self._files))

    def rows(self, table: str, part: str) -> list[Row]:
        files = [file for file in self._files if (file.table, file.part) == (table, part)]
        return [row for file in files for row in read_file(self._store, file).to_pylist()]

    def counts(self) -> dict[str, int]:
        """Rows by table."""
        counts = dict.fromkeys(("findings", "buckets", "state"), 0)
        for file in self._files:
            counts[file.table] += file.rows
        return counts


def _table(rows: list[Row], schema: pa.Schema | None) -> pa.Table:
    if schema is None:
        names = dict.fromkeys(name for row in rows for name in row)  # a newer version counts more
        rows = [{name: row.get(name) for name in names} for row in rows]
    return pa.Table.from_pylist(rows, schema)


# --- findings -------------------------------------------------------------------------------------------------------


def _merge_findings(tables: _Tables, result: Result, since_us: int, now_us: int) -> None:
    shown: dict[str, Row] = {}
    repaired = {case.key for case in result.found if case.evidence.get("repaired")}
    for case in result.found:
        row = row_of(case)
        shown[case.key] = row | {"evidence": json.dumps(row["evidence"])}
    counted: dict[str, int] = {}
    for row in shown.values():
        counted[row["finding"]] = counted.get(row["finding"], 0) + 1

    def is_over(row: Row) -> bool:
        """Whether this audit judged the finding, and it no longer applies."""
        if result.reasons or row["resolved_us"] is not None or row["key"] in shown:
            return False
        if counted.get(row["finding"], 0) < result.counts.get(row["finding"], 0):
            return False  # the audit shows only some of this class
        return since_us <= row["at_us"] < result.to_us if row["at_us"] else not result.from_us

    def change(rows: list[Row], new: Mapping[str, Row]) -> list[Row]:
        known = {row["key"]: row for row in rows}
        for key, row in new.items():
            before = known.get(key, {"first_seen_us": now_us, "resolved_us": None})
            resolved_us = (before["resolved_us"] or now_us) if key in repaired else None
            seen = {"first_seen_us": before["first_seen_us"], "last_seen_us": now_us, "resolved_us": resolved_us}
            known[key] = row | seen
        return [row | {"resolved_us": now_us} if is_over(row) else row for row in known.values()]

    by_day = _by_day(shown.values())
    judged = {UNDATED, *(day for day in tables.parts("findings") if _overlaps(day, since_us, result.to_us))}
    for day in sorted({*by_day, *judged}):
        new = {row["key"]: row for row in by_day.get(day, ())}
        tables.change("findings", day, FINDING_ROWS, lambda rows, new=new: change(rows, new))  # type: ignore[misc]


# --- buckets --------------------------------------------------------------------------------------------------------


def _merge_buckets(tables: _Tables, result: Result, since_us: int) -> None:
    """Rows within the range are replaced. A row of a bucket that the range cuts is of the part within it alone, and of
    two rows that overlap for another reason the longer one stays: no message counts twice."""
    names = ("topic", *TOTALS, *result.counts)
    new = []
    for bucket in result.buckets:
        start_us = max(bucket["at_us"], since_us)
        end_us = max(start_us, min(bucket["at_us"] + result.bucket_us, result.to_us))
        stretch = {"at_us": start_us, "seconds": (end_us - start_us) / 1e6}
        new.append(stretch | {name: bucket.get(name) for name in names})
    by_day = _by_day(new)

    def change(rows: list[Row], new: Iterable[Row]) -> list[Row]:
        kept = [row for row in rows if row["at_us"] < since_us or _end_us(row) > result.to_us]
        others: dict[str, list[Row]] = {}
        for row in kept:
            if _end_us(row) > since_us and row["at_us"] < result.to_us:
                others.setdefault(row["topic"], []).append(row)  # those that the range cuts: two a topic
        for row in new:
            overlapping = [old for old in others.get(row["topic"], ()) if _overlap(old, row)]
            if all(old["seconds"] < row["seconds"] for old in overlapping):
                kept = [old for old in kept if not any(old is each for each in overlapping)] if overlapping else kept
                kept.append(row)
        return sorted(kept, key=lambda row: (row["at_us"], row["topic"]))

    judged = {day for day in tables.parts("buckets") if _overlaps(day, since_us, result.to_us)}
    for day in sorted({*by_day, *judged}):
        tables.change("buckets", day, None, lambda rows, day=day: change(rows, by_day.get(day, ())))  # type: ignore[misc]


def _end_us(row: Row) -> int:
    end_us: int = row["at_us"] + round(row["seconds"] * 1e6)
    return end_us


def _overlap(one: Row, other: Row) -> bool:
    return bool(one["at_us"] < _end_us(other) and other["at_us"] < _end_us(one))


# --- inputs ---------------------------------------------------------------------------------------------------------


def _refuse_others(tables: _Tables, result: Result, url: str) -> None:
    """Raises InvalidRequest if earlier audits had an input that this one lacks: it would call resolved what it did not
    see, and replace the figures of other messages."""
    earlier = {row["name"]: row["expected"] for row in tables.rows("state", "") if row["kind"] == INPUT}
    gone = [name for identity, name in earlier.items() if identity not in result.identities]
    if gone and result.identities:
        raise InvalidRequest(
            f"{url} has the results of audits with other inputs: {first_of(gone, MOST_NAMED)} was not given to this "
            "one, or is another one now. Name it, too, or merge the results of these inputs into tables at another URL"
        )


# --- state ----------------------------------------------------------------------------------------------------------


def _merge_state(tables: _Tables, result: Result, now_us: int) -> None:
    when = {"from_us": result.from_us, "to_us": result.to_us, "audited_us": now_us}
    new: list[Row] = [
        {"kind": each.kind, "name": each.name, "expected": each.expected, "read": each.read, "is_whole": each.is_whole}
        for each in result.coverage
    ]
    new += [
        {"kind": INPUT, "name": identity, "expected": name, "read": name, "is_whole": True}
        for identity, name in lasting(result.identities).items()
    ]
    reasons = "; ".join(result.reasons)[:10_000]
    new.append(
        {"kind": "audit", "name": "newest", "expected": "PASS", "read": f"{result.verdict} {reasons}".strip(),
         "is_whole": result.verdict == "PASS"}
    )  # fmt: skip

    def change(rows: list[Row]) -> list[Row]:
        known = {(row["kind"], row["name"]): row for row in rows}
        known |= {(row["kind"], row["name"]): row | when for row in new}
        return [known[key] for key in sorted(known)]

    tables.change("state", "", STATE_ROWS, change)


def _by_day(rows: Iterable[Row]) -> dict[str, list[Row]]:
    days: dict[str, list[Row]] = {}
    for row in rows:
        days.setdefault(_day(row["at_us"]) if row["at_us"] else UNDATED, []).append(row)
    return days


def _day(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime("%Y-%m-%d")


def _overlaps(day: str, since_us: int, until_us: int) -> bool:
    """Whether a day has an instant of [since, until)."""
    if day == UNDATED:
        return False
    start_us = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1e6)
    return start_us < until_us and since_us < start_us + DAY_US
