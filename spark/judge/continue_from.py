"""The proof of earlier audits of the same inputs, so that the next audit reads only newer messages (`--continue`).

An audit judges transactions that are closed and whose messages are due for delivery, up to `until_us`. The next audit
begins there, and does not read older messages again. It therefore does not see what has gone wrong with them since: a
watch looks again, and an audit without `--continue` reads everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from notify.errors import InvalidRequest
from notify.protocol.wire import UNDECODABLE
from notify.spark.result import Inputs, Plan, Result
from notify.spark.times import instant_text

FILE = "proved.json"


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the audits so far. Instants are in microseconds since 1970."""

    format: int = 1
    until_us: int
    """All transactions before this instant were judged, including the delivery of their messages."""
    audited_us: int
    """When the last of these audits ended."""
    audits: int
    sources: dict[str, str]
    """The source id of each database, by name."""
    logs: dict[str, tuple[int, int]]
    """The newest segment that was read of each log: its base, and when it was made."""
    producer_groups: list[str]
    """The producer groups with local rows: the tables have no index for them."""
    counts: dict[str, int]
    """The findings of all audits, by class. A finding without a message counts in each audit that reports it."""
    committed: int
    """How many messages were committed."""


def begun(plan: Plan, directory: Path, inputs: Inputs, *, goes_on: bool) -> tuple[Plan, Proved | None]:
    """The plan of the next audit, and the proof of the earlier ones; None: there is no proof, and everything is read.

    `goes_on`: whether the audit continues an earlier one. Raises InvalidRequest if the plan is impossible, or if the
    earlier audits had other inputs.
    """
    plan.check()
    if not goes_on:
        return plan, None
    if plan.from_us or plan.to_us:
        raise InvalidRequest("--continue chooses the range: leave --from and --to out")
    proved = _load(directory, inputs)
    if proved is None:
        return plan, None
    later = replace(plan, from_us=proved.until_us, continues=True, producer_groups=tuple(proved.producer_groups))
    return later, proved


def _load(directory: Path, inputs: Inputs) -> Proved | None:
    path = directory / FILE
    try:
        proved = msgspec.json.decode(path.read_bytes(), type=Proved)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise InvalidRequest(f"--continue: {path} cannot be read ({error}); run an audit without --continue") from None
    _refuse_others(proved, inputs)
    return proved


def _refuse_others(proved: Proved, inputs: Inputs) -> None:
    again = "run an audit of everything, without --continue"
    if inputs.kafka or inputs.storages:
        raise InvalidRequest("--continue works only with logs of servers: leave --kafka and --storage out")
    if proved.sources != _sources(inputs):
        raise InvalidRequest(f"--continue: the earlier audits had other databases; {again}")
    if proved.logs.keys() != {log.name for log in inputs.logs}:
        raise InvalidRequest(f"--continue: the earlier audits had other logs; {again}")
    for log in inputs.logs:
        newest = proved.logs[log.name]
        is_dropped = newest[0] < log.segments[0].base
        if not is_dropped and newest not in {segment.identity for segment in log.segments}:
            raise InvalidRequest(
                f"--continue: log {log.name} lacks the segment at {newest[0]} that an audit has read: it was "
                f"replaced, or an older copy took its place; {again}"
            )


def conclude(directory: Path, plan: Plan, inputs: Inputs, result: Result, before: Proved | None) -> None:
    """Add a note about the earlier audits to the result, and write the new proof.

    An inconclusive audit, or one of a given range, proves nothing, and writes nothing.
    """
    if before is not None:
        _note(before, result)
    is_ranged = before is None and bool(plan.from_us or plan.to_us)
    if result.reasons or is_ranged or inputs.kafka or inputs.storages:
        return
    counts: Mapping[str, int] = before.counts if before is not None else {}
    proved = Proved(
        until_us=max(result.judged_us, before.until_us if before is not None else 0),
        audited_us=time.time_ns() // 1000,
        audits=1 + (before.audits if before is not None else 0),
        sources=_sources(inputs),
        logs={log.name: log.segments[-1].identity for log in inputs.logs},
        producer_groups=sorted(result.producer_groups),
        counts={name: count + counts.get(name, 0) for name, count in result.counts.items() if name != "PENDING"},
        committed=result.totals.get("committed", 0) + (before.committed if before is not None else 0),
    )
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{FILE}.tmp"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(proved))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / FILE)


def _note(proved: Proved, result: Result) -> None:
    """Add a note about the earlier audits to the result."""
    findings = ", ".join(f"{count} {name}" for name, count in proved.counts.items() if count) or "no finding"
    result.notes.append(
        f"continues where the audit of {instant_text(proved.audited_us)} ended: {proved.audits} audits judged "
        f"{proved.committed:,} messages committed before {instant_text(proved.until_us)}, with {findings}; these are "
        "not read again"
    )


def _sources(inputs: Inputs) -> dict[str, str]:
    return {database.name: database.source_id() for database in inputs.databases}
