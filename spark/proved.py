"""Proofs of earlier audits of the same inputs, so that the next one reads only what came since (`--continue`).

An audit judges what is closed and due for delivery; `until_us` is the end of that. The next audit begins there: what
was open then is judged by it, and what was judged is not read again. So it does not see what went wrong with older
messages since: a watch looks again, and an audit without `--continue` reads everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from notify.errors import InvalidRequest
from notify.spark.result import Inputs, Plan, Result
from notify.spark.times import instant_text

FILE = "proved.json"


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the audits so far. Instants are in microseconds since 1970."""

    format: int = 1
    until_us: int
    """All transactions before it were judged, and whether their messages were delivered."""
    audited_us: int
    """When the last of these audits ended."""
    audits: int
    sources: dict[str, str]
    """The source id of each database, by its name."""
    logs: dict[str, tuple[int, int]]
    """The newest segment of each log that was read: where it begins, and when it was made."""
    producer_groups: list[str]
    """Those with local rows: a table has no index for them."""
    counts: dict[str, int]
    """Findings of all audits, by class; those of no message are counted in each."""
    committed: int
    """Messages that were committed."""


def begun(plan: Plan, directory: Path, inputs: Inputs, *, goes_on: bool) -> tuple[Plan, Proved | None]:
    """The plan of the next audit, and what was proved; None: nothing yet, and the plan is to read everything.

    `goes_on`: whether it goes on where an audit ended. Raises InvalidRequest for a plan that cannot be, and where other
    inputs were audited.
    """
    plan.check()
    if not goes_on:
        return plan, None
    if plan.from_us or plan.to_us:
        raise InvalidRequest("--continue chooses the range: leave --from and --to out")
    known = _load(directory, inputs)
    if known is None:
        return plan, None
    later = replace(plan, from_us=known.until_us, continues=True, producer_groups=tuple(known.producer_groups))
    return later, known


def _load(directory: Path, inputs: Inputs) -> Proved | None:
    path = directory / FILE
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Proved)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"--continue: {path} cannot be read ({error}); run an audit without --continue") from None
    _refuse_others(known, inputs)
    return known


def _refuse_others(known: Proved, inputs: Inputs) -> None:
    again = "run an audit of everything, without --continue"
    if inputs.kafka or inputs.storages:
        raise InvalidRequest("--continue goes on with the logs of servers, and there is a --kafka or --storage")
    if known.sources != _sources(inputs):
        raise InvalidRequest(f"--continue: the databases are not those of the audits before; {again}")
    if known.logs.keys() != {log.name for log in inputs.logs}:
        raise InvalidRequest(f"--continue: the logs are not those of the audits before; {again}")
    for log in inputs.logs:
        newest = known.logs[log.name]
        is_dropped = newest[0] < log.segments[0].base
        if not is_dropped and newest not in {segment.identity for segment in log.segments}:
            raise InvalidRequest(
                f"--continue: log {log.name} lacks the segment at {newest[0]} that an audit has read: it was "
                f"replaced, or an older copy took its place; {again}"
            )


def conclude(directory: Path, plan: Plan, inputs: Inputs, result: Result, before: Proved | None) -> None:
    """Note what the result rests on, and write what is proved now. An audit that was in doubt, or that had a range of
    its own, proves nothing more."""
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


def _note(known: Proved, result: Result) -> None:
    """Say in the result what it rests on."""
    named = ", ".join(f"{count} {name}" for name, count in known.counts.items() if count) or "no finding"
    result.notes.append(
        f"goes on where the audit of {instant_text(known.audited_us)} ended: {known.committed:,} messages committed "
        f"before {instant_text(known.until_us)} were judged by {known.audits} audits, with {named}, and are not read "
        "again"
    )


def _sources(inputs: Inputs) -> dict[str, str]:
    return {database.name: database.source_id() for database in inputs.databases}
