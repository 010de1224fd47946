"""Prints an audit for people: what was read, what to do first, the findings, and the verdict as the last line."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from notify.cli.printed import say, say_json
from notify.protocol.wire import instant

if TYPE_CHECKING:
    from notify.spark.explain.explained import Explained
    from notify.spark.result import Covered, Result

COVERED = 12
"""The most lines of coverage; incomplete inputs come first, and the report has all lines."""
CASES = 3
"""The most cases of each class."""
DEAD = 10
PAGE_CHARACTERS = 500_000
"""The most characters of a report that a server keeps."""


def show(result: Result, page: Path, *, as_json: bool) -> None:
    """Print the result. `page`: the path of the report's page."""
    from notify.spark.judge.findings import FINDINGS
    from notify.spark.report.files import plain

    if as_json:
        say_json(plain(result))
        return
    _coverage(result.coverage, page)
    _causes(result)
    for finding in FINDINGS:
        count = result.counts.get(finding.name, 0)
        if count:
            say(f"  {finding.name:<16} {count:,}")
        if finding.name in result.not_checked:
            say(f"  {finding.name:<16} not checked: {result.not_checked[finding.name]}")
    _dead(result)
    _cases(result, page)
    for note in result.notes:
        say(f"note: {note}")
    for reason in result.reasons:
        say(f"not judged: {reason}")
    if result.completeness is not None:
        say(result.completeness.sentence)
    totals = result.totals
    left_out = result.counts.get("LEFT_OUT", 0)
    never = f", {left_out:,} that a group never settled" if left_out else ""
    pending = result.counts.get("PENDING", 0)
    if pending and result.judges_all_us:
        never += f", {pending:,} PENDING, which an audit can judge from {instant(result.judges_all_us)} on"
    say(
        f"{result.verdict}: {totals['committed']:,} committed messages, {totals['in_queues']:,} in queues, "
        f"{totals['effects']:,} with effects{never}; {result.seconds:.1f} s; report: {page}"
    )


def _coverage(lines: list[Covered], page: Path) -> None:
    say("inputs:")
    ordered = sorted(lines, key=lambda line: line.is_whole)
    for line in ordered[:COVERED]:
        mark = " " if line.is_whole else "!"
        say(f"{mark} {line.name}: {line.kind}: expected {line.expected}; read: {line.read}")
    if len(lines) > COVERED:
        say(f"  … and {len(lines) - COVERED:,} more, in {page}")


def _causes(result: Result) -> None:
    if not result.causes:
        return
    say("do first:")
    for number, cause in enumerate(result.causes, 1):
        say(f"{number:>3}. {cause.sentence}" + ("" if cause.finding == "INCONCLUSIVE" else f" ({cause.finding})"))
        for command in cause.commands:
            say(f"       {command}")
    if result.causes_left:
        say(f"     and {result.causes_left:,} more causes")


def _dead(result: Result) -> None:
    for row in result.dead[:DEAD]:
        say(f"    DEAD {row['group']}: {row['count']:,} times {row['reason']}")
    if len(result.dead) > DEAD:
        say(f"    … and {len(result.dead) - DEAD:,} more reasons")


def _cases(result: Result, page: Path) -> None:
    cases_of_class: Counter[str] = Counter()
    for case in result.found:
        cases_of_class[case.finding] += 1
        if cases_of_class[case.finding] > CASES:
            continue
        evidence = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in case.words().items())
        say(f"    {case.finding} {case.message_id or case.log}: {case.detail}" + (f" ({evidence})" if evidence else ""))
    if more := sum(max(0, count - CASES) for count in cases_of_class.values()):
        say(f"    … and {more:,} more, in {page.parent}/findings.parquet")


def show_explained(explained: Explained) -> None:
    """Print one transaction: its events, its repairs, and the verdict as the last line."""
    for event in explained.events:
        moment = datetime.fromtimestamp(event.at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        say(f"{moment}  {event.source:<18} {event.what}")
    for sent in explained.repairs:
        say(f"repair of {sent.of}: {sent.sentence}")
    if explained.repeats:
        say(explained.repeats)
    say(explained.sentence)


def published(result: Result, page: Path) -> dict[str, object]:
    """The part of an audit that a server keeps; without the page if the page is too large."""
    text = page.read_text()
    return {
        "reason": "notify audit run",
        "verdict": result.verdict,
        "counts": {name: count for name, count in result.counts.items() if count},
        "totals": result.totals,
        "reasons": [reason[:300] for reason in result.reasons[:100]],
        "since": instant(result.from_us),
        "until": instant(result.to_us),
        "report": text if len(text) <= PAGE_CHARACTERS else "",
    }
