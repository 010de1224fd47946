"""A continuous audit: one time window after another, each in batch, by this machine's clock.

It does not use a stream-stream join, because the watermark of such a join is that of its slower input: an input that
stalls would stop it and so hide lost messages. Instead a window is audited once this machine's clock says that its
transactions must be over, whatever the inputs say. Later looks (looks.py) audit it again: they revise findings about
messages that arrived late, and find what went wrong since.

The state is a directory with `watch.db` (ledger.py), which gets a window's findings and the next position in one
transaction, and `findings.jsonl` (lines.py). A watch that was killed audits its last window again, and reports each
finding once.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from pyspark.sql import SparkSession

from notify.errors import InvalidRequest, NotifyError
from notify.runtime.visible import first_of
from notify.spark.audit import Audit
from notify.spark.inputs.log_read import LogRead
from notify.spark.judge.findings import BY_NAME, MAY_PASS
from notify.spark.report.files import row_of
from notify.spark.report.results import merge
from notify.spark.result import Found, Inputs, Plan, Result
from notify.spark.times import instant_text
from notify.spark.watch import looks
from notify.spark.watch.alarms import Alarms
from notify.spark.watch.conditions import MOST_REASONS, Conditions, is_quiet
from notify.spark.watch.ledger import Ledger, Position
from notify.spark.watch.lines import Line, Lines
from notify.spark.watch.segments import compare
from notify.storage import crash_point

log = logging.getLogger("notify.audit")

RETRY_SECONDS = 5.0
DEATHS = 3
"""A process that died this often within one window raises an alarm; a second audit that failed this often skips its
windows."""
MOST_NAMED = 20
"""The most inputs that one line names."""

WINDOWS = Counter("notify_audit_windows", "Windows that were audited.")
FINDINGS = Counter("notify_audit_findings", "Findings, by class.", ["finding"])
REVISIONS = Counter("notify_audit_revisions", "Findings that a later audit revised.", ["finding"])
LOOKS = Counter("notify_audit_looks", "Audits of windows that were audited before.", ["look"])
FAILURES = Counter("notify_audit_failures", "Failed attempts to audit a window.")
CLOSED = Gauge("notify_audit_closed_timestamp_seconds", "The end of the last audited window, in seconds since 1970.")
SECONDS = Gauge("notify_audit_window_seconds", "How long the audit of the last window took.")
INCONCLUSIVE = Gauge("notify_audit_inconclusive", "1 if the last window could not be judged.")


@dataclass(frozen=True)
class Auditing:
    """Audits a window by its plan. `inputs` opens the inputs for each window; `scratch` holds copies of the log.

    `results`: the URL of tables that each audit is merged into; "" for none.
    """

    spark: SparkSession
    inputs: Callable[[], AbstractContextManager[Inputs]]
    scratch: Path | str
    results: str = ""
    producer_groups: set[str] = field(default_factory=set)
    """The producer groups of earlier windows: only the first window reads all of them from each table."""

    def __call__(self, plan: Plan) -> Result:
        with self.inputs() as inputs:
            known = replace(plan, producer_groups=tuple(self.producer_groups))
            result = Audit(self.spark, known, inputs, self.scratch).run()
            self.producer_groups.update(result.producer_groups)
            result.logs = [LogRead.of(log) for log in inputs.logs]
        if self.results:
            merge(result, self.results)
        return result


class Watch:
    """Audits windows as they close. `emit` is called with each line, a mapping. Close it at the end."""

    def __init__(
        self,
        audit: Callable[[Plan], Result],
        plan: Plan,
        directory: Path,
        *,
        window_seconds: float = 60.0,
        emit: Callable[[Line], None] = lambda line: None,
        alarm_url: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`audit`: see `Auditing`. `plan.from_us`: the start of the first window; 0: now.

        Raises InvalidRequest for invalid settings and a damaged state; Conflict if another watch has the state.
        """
        if window_seconds < 1:
            raise InvalidRequest("--window-seconds must be at least 1")
        self._audit = audit
        self._plan = replace(plan, closes_by_clock=True)
        self._window_us = round(window_seconds * 1e6)
        self._emit = emit
        self._clock = clock
        self._delay_us = round(max(plan.max_transaction_seconds, plan.deliver_seconds) * 1e6)
        self._oldest_us = 0
        """Data before this is not retained by all inputs, as the last window's audit saw."""
        self._ledger = Ledger(directory)
        try:
            self._alarms = Alarms(self._ledger, alarm_url, clock)
            self._conditions = Conditions(self._ledger)
            self._begun = self._begin(directory)
            """Lines of the beginning, which `run` reports."""
            self._lines = Lines(self._ledger)
            self._lines.write()
        except BaseException:
            self._ledger.close()
            raise

    @property
    def position(self) -> Position:
        """The committed position."""
        assert self._ledger.position is not None
        return self._ledger.position

    def _begin(self, directory: Path) -> list[Line]:
        """Note where a new watch begins, before its first audit: one that is killed starts with the same window.

        Returns a line if there was a watch before whose state is gone."""
        crash_point.reached("watch.at_start")
        if (position := self._ledger.position) is not None:
            with self._ledger.transaction():
                looks.begin(self._ledger, position.next_us)
            return []
        with self._ledger.transaction():
            start = self._plan.from_us or int(self._clock() * 1e6)
            position = _first_position(self._ledger, directory, start // self._window_us * self._window_us)
            self._ledger.move(position)
            if lines := _lost_state(position):
                self._announce(lines)
        return lines

    def close(self) -> None:
        """Close the state."""
        self._ledger.close()

    # --- windows ----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, windows: int = 0) -> None:
        """Audit windows until `stop`, or at most `windows` (0: no limit). Raises InvalidRequest for a wrong plan or
        input before the first window of this state; later a missing input delays the window."""
        done = 0
        if self._begun:
            self._say(self._begun)
            self._begun = []
        while not stop.is_set() and not (windows and done >= windows):
            self._alarms.send()
            due = (self.position.next_us + self._window_us + self._delay_us) / 1e6
            while (wait := due - self._clock()) > 0:
                self._heed_clock()
                if stop.wait(min(wait, 0.5)):
                    return
                self._alarms.send()
            try:
                self._next()
                done += 1
                if not stop.is_set():
                    self._look()
            except Exception as error:
                # The window stays due: no window is skipped because an input is unreachable.
                self.failed(error)
                # The flags were valid before, so an input is missing, and may come back.
                is_wrong = isinstance(error, InvalidRequest) and not self.position.window
                if is_wrong or not _is_transient(error):
                    raise
                if stop.wait(RETRY_SECONDS):
                    return
        self._alarms.send()

    def _heed_clock(self) -> None:
        """Report it if the next window begins in the future: the clock was ahead before, or is behind now."""
        start, now_us = self.position.next_us, int(self._clock() * 1e6)
        if start - now_us > self._window_us:
            with self._ledger.transaction():
                lines = self._conditions.behind(start, now_us)
                self._announce(lines)
            self._say(lines)

    def _next(self) -> None:
        """Audit the next window."""
        position = self.position
        start, end = position.next_us, position.next_us + self._window_us
        with self._ledger.transaction():
            self._ledger.move(replace(position, attempts=position.attempts + 1))
            if position.attempts == DEATHS:
                cause = f"the watch died {DEATHS} times while it audited this window; see what ends it, such as memory"
                self._alarms.add(f"DIED:{start}", {"kind": "failure", "window_us": start, "detail": cause})
        self._alarms.send()
        crash_point.reached("watch.before_audit")
        result = self._audited(start, end)
        crash_point.reached("watch.after_audit")
        compared = compare(self._ledger, result.logs, int(self._clock() * 1e6))
        _add(result, compared.found)
        crash_point.reached("watch.before_commit")
        with self._ledger.transaction():
            quiet_us = (position.quiet_since_us or start) if is_quiet(result) else 0
            lines = self._findings(result.found, start, end)
            compared.write(self._ledger)
            lines += self._conditions.lines(result, start, end, quiet_us) + self._exchanged(result, start)
            window = position.window + 1
            self._ledger.move(replace(self.position, next_us=end, window=window, attempts=0, quiet_since_us=quiet_us))
            self._ledger.forget()
            self._announce(lines)
            crash_point.reached("watch.in_commit")
        crash_point.reached("watch.after_commit")
        self._oldest_us = max((entry["from_us"] for entry in result.inputs), default=0)
        self._say([*lines, _window_line(result, start)])
        WINDOWS.inc()
        CLOSED.set(end / 1e6)
        SECONDS.set(result.seconds)
        INCONCLUSIVE.set(bool(result.reasons))

    def _audited(self, start: int, end: int, *, with_strays: bool = False) -> Result:
        return self._audit(replace(self._plan, from_us=start, to_us=end, with_strays=with_strays))

    def failed(self, error: Exception, start: int = 0, look: str = "") -> None:
        """Report that the next window, or the one at `start`, could not be audited, by a look if one is named. The
        first failure of a window is an alarm."""
        FAILURES.inc()
        start = start or self.position.next_us
        cause = str(error).splitlines()[0][:300] if str(error) else repr(error)
        line = {"kind": "failure", "window_us": start, "detail": cause}
        key = _failure_key(start, look)
        try:
            with self._ledger.transaction():
                self._ledger.move(replace(self.position, attempts=0))
                if not self._ledger.is_known(key):
                    self._ledger.know(key, start, self.position.window)
                    self._alarms.add(self._alarm_key(key), line)
            self._alarms.send()
        except sqlite3.Error as full:
            log.error("the state of the watch cannot be written: %s", full)
        self._alarms.say(line)
        self._emit(line)

    # --- lines ------------------------------------------------------------------------------------------------

    def _findings(self, cases: Sequence[Found], start: int, end: int, *, again: bool = False) -> list[Line]:
        """Lines for the unreported findings of the windows from `start` to `end`. `again`: whether these were audited
        before, so that their findings may be forgotten."""
        lines: list[Line] = []
        for case in _by_group(cases):
            if not self._fails(case.finding) or case.evidence.get("repaired"):
                continue
            is_new = not self._ledger.is_known(case.key)
            own_us = case.at_us // self._window_us * self._window_us if start <= case.at_us < end else start
            if again and is_new and self._ledger.has_forgotten(own_us):
                continue  # it may have been reported
            self._ledger.know(case.key, own_us, self.position.window)
            if is_new:
                FINDINGS.labels(case.finding).inc()
                lines.append({"kind": "finding", "window_us": own_us} | row_of(case))
        return lines

    def _exchanged(self, result: Result, start: int) -> list[Line]:
        """A line if inputs of earlier windows are missing: the findings of these windows came from other inputs."""
        gone = self._ledger.take_inputs(result.identities, start) if result.identities else []
        if not gone:
            return []
        named = first_of(gone, MOST_NAMED)
        detail = (
            f"the windows before {instant_text(start)} were audited with other inputs: {named} was not given again, or "
            "is another one now. Findings of these windows are no longer revised. Name the earlier inputs again, or "
            "begin another watch with another --state"
        )
        return [{"kind": "inconclusive", "window_us": start, "key": f"INPUTS:{start}", "detail": detail}]

    def _is_alarm(self, line: Line) -> bool:
        return line["kind"] in ("stalled", "inconclusive") or (
            line["kind"] == "finding" and self._fails(line["finding"])
        )

    def _fails(self, name: str) -> bool:
        """Whether findings of a class fail an audit by this plan."""
        return BY_NAME[name].is_bad or name in self._plan.fail_on

    def _announce(self, lines: Sequence[Line]) -> None:
        """Add lines and their alarms, within the ledger's transaction."""
        self._ledger.add_lines(lines)
        for line in lines:
            if self._is_alarm(line):
                self._alarms.add(self._alarm_key(line["key"]), line)

    def _alarm_key(self, key: str) -> str:
        """The key of a finding's alarm. It changes when a finding returns, so that the receiver takes no repetition."""
        returns = self._ledger.returns(key)
        return f"{key}#{returns + 1}" if returns else key

    def _say(self, lines: Sequence[Line]) -> None:
        self._lines.write()
        for line in lines:
            if self._is_alarm(line):
                self._alarms.say(line)
            self._emit(line)

    # --- looks at earlier windows -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Audit earlier windows again, if a look is due. If a look repeatedly fails or crashes the process, its windows
        are skipped."""
        position = self.position
        turn = looks.due(self._ledger, position, self._window_us, self._oldest_us)
        if turn is None:
            return
        start, end, name = turn.from_us, turn.to_us, turn.at.name
        done = replace(turn.at, next_us=end, window=position.window, attempts=0)
        is_left_out = turn.at.attempts >= DEATHS
        with self._ledger.transaction():
            self._ledger.move_look(done if is_left_out else replace(turn.at, attempts=turn.at.attempts + 1))
            if is_left_out:
                self._ledger.revise(_failure_key(start, name))
                cause = f"windows up to {instant_text(end)} are not audited again now: that failed {DEATHS} times"
                key = f"LEFT_OUT:{name}:{start}:{position.window}"
                self._alarms.add(key, {"kind": "failure", "window_us": start, "detail": cause})
        if is_left_out:
            return
        crash_point.reached("watch.before_look")
        try:
            result = self._audited(start, end, with_strays=name == looks.ROUND.name and turn.is_first)
        except Exception as error:
            if not _is_transient(error):
                raise
            self.failed(error, start, name)
            return
        with self._ledger.transaction():
            lines = self._findings(result.found, start, end, again=True)
            lines += self._revised(result, start, end) + self._conditions.doubts(result, start)
            self._ledger.revise(_failure_key(start, name))  # in another round it is an alarm again
            self._ledger.move_look(done)
            self._ledger.forget()
            self._announce(lines)
            crash_point.reached("watch.in_look")
        self._say(lines)
        LOOKS.labels(name).inc()

    def _revised(self, result: Result, start: int, end: int) -> list[Line]:
        """Lines for findings of the windows from `start` to `end` that no longer apply."""
        if result.reasons or start < self._ledger.changed_us:
            return []  # an inconclusive audit, or one with other inputs, may miss findings that still apply
        shown = Counts(f.finding for f in result.found)
        stand = {f.key for f in _by_group(result.found) if not f.evidence.get("repaired")}
        lines: list[Line] = []
        for window_us, key in self._ledger.said_between(start, end):
            name = key.partition(":")[0]
            # An audit shows only a part of a class with very many findings.
            if name in MAY_PASS and key not in stand and result.counts.get(name, 0) <= shown[name]:
                self._ledger.revise(key)
                REVISIONS.labels(name).inc()
                lines.append(
                    {"kind": "revision", "window_us": window_us, "finding": name, "key": key,
                     "detail": "the finding no longer applies"}
                )  # fmt: skip
        return lines


def tell_failure(directory: Path, alarm_url: str, error: Exception) -> None:
    """Raise the alarm of a watch that ends, or cannot begin: once for its next window. Raises what `Watch` raises."""

    def audit(plan: Plan) -> Result:
        raise error

    with closing(Watch(audit, Plan(), directory, alarm_url=alarm_url)) as watch:
        watch.failed(error)


def _failure_key(start: int, look: str) -> str:
    return ":".join(part for part in ("FAILURE", look, str(start)) if part)


def _window_line(result: Result, start: int) -> Line:
    return {
        "kind": "window", "window_us": start, "verdict": result.verdict,
        "counts": {name: count for name, count in result.counts.items() if count},
        "committed": result.totals.get("committed", 0), "seconds": result.seconds,
        "reasons": result.reasons[:MOST_REASONS],
    }  # fmt: skip


def _add(result: Result, found: Sequence[Found]) -> None:
    """Add findings to a window's result."""
    for case in found:
        result.found.append(case)
        result.counts[case.finding] = result.counts.get(case.finding, 0) + 1
    if found:
        result.verdict = "FINDINGS"


def _by_group(cases: Iterable[Found]) -> Iterator[Found]:
    """The cases, one for each group: of several groups, one may be repaired before another."""
    for case in cases:
        if len(case.groups) > 1 and BY_NAME[case.finding].by_group:
            together = ", ".join(case.groups)
            for number, group in enumerate(case.groups):
                detail = case.of_groups[number] if case.of_groups else case.detail.replace(together, group)
                yield replace(case, groups=[group], detail=detail)
        else:
            yield case


def _is_transient(error: Exception) -> bool:
    """Whether to try again: a database or a disk may have failed during the audit."""
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return False  # the watch's own state is damaged
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, NotifyError | OSError) or library in ("pyspark", "py4j", "sqlalchemy", "sqlite3")


def _first_position(ledger: Ledger, directory: Path, start_us: int) -> Position:
    """Where a watch with a new ledger begins. Call it within a transaction of the ledger.

    If an earlier ledger was lost, findings.jsonl fills the new one, so that no finding is reported twice.
    """
    lines = directory / "findings.jsonl"
    size = 0
    if lines.exists():
        with lines.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a kill cut it short: its window is audited again
                size += len(line)
                _note(ledger, line)
    ledger.forget()
    looks.begin(ledger, start_us)
    full = [int(path.stem.rpartition("-")[2]) for path in directory.glob("findings-[0-9]*.jsonl")]
    number = max(full, default=0) + 1
    return Position(start_us, file_number=number, file_offset=size)


def _lost_state(begun: Position) -> list[Line]:
    """A line if an earlier watch left findings but its state is gone: windows that it had not audited are missing."""
    if begun.file_number == 1 and not begun.file_offset:
        return []
    detail = (
        f"the state of the earlier watch (watch.db) is gone: this one begins at {instant_text(begun.next_us)} and "
        "skips older windows. Audit the time before with notify audit run"
    )
    start = begun.next_us
    return [{"kind": "inconclusive", "window_us": start, "key": f"STATE:{start}", "detail": detail}]


def _note(ledger: Ledger, line: bytes) -> None:
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:
        return  # damaged: its finding may be reported again
    if said.get("kind") == "finding":
        ledger.know(said["key"], said["window_us"], 0)
    elif said.get("kind") == "revision":
        ledger.revise(said["key"])
