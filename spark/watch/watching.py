"""A continuous audit: one time window after the other, each in batch, by this machine's clock.

It is no stream-stream join, because the watermark of such a join is that of its slower input: an input that stalls
would stop it and so hide lost messages. Instead a window is audited once this machine's clock says that its
transactions must be over, whatever the inputs say. A message that arrives later revises the finding.

The state is a directory with `watch.db` (ledger.py), which moves on in one transaction with what a window's audit
showed, and `findings.jsonl` (lines.py). A watch that was killed audits its last window again, and says each finding
once.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from pyspark.sql import SparkSession

from notify.errors import InvalidRequest, NotifyError
from notify.spark.audit import Audit
from notify.spark.findings import BY_NAME
from notify.spark.report.files import row_of
from notify.spark.result import Found, Inputs, Plan, Result
from notify.spark.watch.alarms import Alarms
from notify.spark.watch.earlier import take_over
from notify.spark.watch.ledger import Ledger, Position, Waiting
from notify.spark.watch.lines import Lines
from notify.storage import crash_point

log = logging.getLogger("notify.audit")

RECHECKS = (2, 4, 8, 16)
"""A window with findings is audited again after so many further windows; messages that came late revise them."""
RECHECK_EVERY, RECHECKED_AT_ONCE = 3, 3
"""However many windows wait: one more audit in so many windows, of so many windows that follow each other."""
RETRY_SECONDS = 5.0
QUIET_SECONDS = 3600.0
"""Without anything to audit for so long a watch raises an alarm: nothing was sent, or all inputs are empty."""
MOST_REASONS = 20
DEATHS = 3
"""A process that died so often within one window raises an alarm."""
REVISED = ("LOST", "UNSENT", "IN_DOUBT", "UNDELIVERED", "ACKED_NO_EFFECT", "CONFLICT", "GHOST", "ORPHAN_ROW")
NEVER_SAID = ("PENDING", "REDELIVERED", "DROPPED", "DEAD")
"""A class of these is said if the plan's `fail_on` has it."""

WINDOWS = Counter("notify_audit_windows", "Windows that were audited.")
FINDINGS = Counter("notify_audit_findings", "Findings, by class.", ["finding"])
REVISIONS = Counter("notify_audit_revisions", "Findings that a later audit revised.", ["finding"])
FAILURES = Counter("notify_audit_failures", "Failed attempts to audit a window.")
CLOSED = Gauge("notify_audit_closed_timestamp_seconds", "The end of the last audited window, in seconds since 1970.")
SECONDS = Gauge("notify_audit_window_seconds", "How long the audit of the last window took.")
INCONCLUSIVE = Gauge("notify_audit_inconclusive", "1 if the last window could not be judged.")

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.\d]*Z?")
_NAMED = "".join(f"(?<!{noun} )" for noun in ("database", "group", "groups", "log", "source", "storage", "topic"))
_NUMBER = re.compile(rf"{_NAMED}(?<![\w.-])\d[\d,]*(\.\d+)?(?![\w-]|\.\w)")

Line = dict[str, Any]


@dataclass(frozen=True)
class Auditing:
    """Audits a window by its plan. `inputs` opens the inputs for each window; `scratch` holds copies of the log."""

    spark: SparkSession
    inputs: Callable[[], AbstractContextManager[Inputs]]
    scratch: Path

    def __call__(self, plan: Plan) -> Result:
        with self.inputs() as inputs:
            return Audit(self.spark, plan, inputs, self.scratch).run()


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

        Raises InvalidRequest for settings that cannot be, and a state that is damaged; Conflict where another watch
        has the state.
        """
        if window_seconds < 1:
            raise InvalidRequest("--window-seconds must be at least 1")
        self._audit = audit
        self._plan = replace(plan, closes_by_clock=True)
        self._window_us = round(window_seconds * 1e6)
        self._emit = emit
        self._clock = clock
        self._delay_us = round(max(plan.max_transaction_seconds, plan.deliver_seconds) * 1e6)
        self._ledger = Ledger(directory)
        try:
            self._alarms = Alarms(self._ledger, alarm_url, clock)
            self._begin(directory)
            self._lines = Lines(self._ledger)
            self._lines.write()
        except BaseException:
            self._ledger.close()
            raise

    @property
    def position(self) -> Position:
        """As it was committed."""
        assert self._ledger.position is not None
        return self._ledger.position

    def _begin(self, directory: Path) -> None:
        """Note where a new watch begins, before its first audit: one that is killed starts with the same window."""
        crash_point.reached("watch.at_start")
        if self._ledger.position is not None:
            return
        with self._ledger.transaction():
            start = self._plan.from_us or int(self._clock() * 1e6)
            self._ledger.move(take_over(self._ledger, directory, start // self._window_us * self._window_us))

    def close(self) -> None:
        """Let go of the state."""
        self._ledger.close()

    # --- windows ----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, windows: int = 0) -> None:
        """Audit windows until `stop`, or so many (0: no limit). Raises InvalidRequest for a wrong plan or input
        before the first window of this state; later an input that is gone holds the window up."""
        done = 0
        while not stop.is_set() and not (windows and done >= windows):
            self._alarms.send()
            due = (self.position.next_us + self._window_us + self._delay_us) / 1e6
            while (wait := due - self._clock()) > 0:
                if stop.wait(min(wait, 0.5)):
                    return
                self._alarms.send()
            try:
                self._next()
                done += 1
            except Exception as error:
                # The window stays due: no window is skipped because an input is away.
                self.failed(error)
                # Flags that were right once are right: then an input is gone, and may come back.
                is_wrong = isinstance(error, InvalidRequest) and not self.position.window
                if is_wrong or not _is_transient(error):
                    raise
                if stop.wait(RETRY_SECONDS):
                    return
        self._alarms.send()

    def _next(self) -> None:
        """Audit the next window, and one more that waits if it is time to."""
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
        again = self._due()
        rechecked = self._audited(again[0].from_us, again[-1].to_us) if again else None
        crash_point.reached("watch.before_commit")
        with self._ledger.transaction():
            quiet_us = (position.quiet_since_us or start) if _is_quiet(result) else 0
            lines = self._findings(result.found, start, end)
            lines += self._conditions(result, start, end, quiet_us)
            if any(line["kind"] == "finding" and line["finding"] in REVISED for line in lines):
                self._ledger.wait(Waiting(start, end, 0, position.window + RECHECKS[0]))
            if rechecked is not None:
                lines += self._revised(rechecked, again)
            moved = replace(
                self.position, next_us=end, window=position.window + 1, attempts=0, quiet_since_us=quiet_us,
                rechecked=position.window if again else position.rechecked,
            )  # fmt: skip
            self._ledger.move(moved)
            self._ledger.forget()
            self._announce(lines)
            crash_point.reached("watch.in_commit")
        crash_point.reached("watch.after_commit")
        self._say(lines, _window_line(result, start))
        WINDOWS.inc()
        CLOSED.set(end / 1e6)
        SECONDS.set(result.seconds)
        INCONCLUSIVE.set(bool(result.reasons))

    def _audited(self, start: int, end: int) -> Result:
        return self._audit(replace(self._plan, from_us=start, to_us=end))

    def failed(self, error: Exception) -> None:
        """Say that a window could not be audited; its first failure is an alarm."""
        FAILURES.inc()
        start = self.position.next_us
        cause = str(error).splitlines()[0][:300] if str(error) else repr(error)
        line = {"kind": "failure", "window_us": start, "detail": cause}
        key = f"FAILURE:{start}"
        try:
            with self._ledger.transaction():
                self._ledger.move(replace(self.position, attempts=0))
                if not self._ledger.is_known(key):
                    self._ledger.know(key, start, self.position.window)
                    self._alarms.add(key, line)
            self._alarms.send()
        except sqlite3.Error as full:
            log.error("the state of the watch cannot be written: %s", full)
        self._alarms.say(line)
        self._emit(line)

    # --- lines ------------------------------------------------------------------------------------------------

    def _findings(self, cases: Sequence[Found], start: int, end: int) -> list[Line]:
        """Lines for the findings that were not said yet, of the windows from `start` to `end`."""
        lines: list[Line] = []
        for case in cases:
            if (case.finding in NEVER_SAID and not self._fails(case.finding)) or case.evidence.get("repaired"):
                continue
            is_new = not self._ledger.is_known(case.key)
            own_us = case.at_us // self._window_us * self._window_us if start <= case.at_us < end else start
            self._ledger.know(case.key, own_us, self.position.window)
            if is_new:
                FINDINGS.labels(case.finding).inc()
                lines.append({"kind": "finding", "window_us": own_us} | row_of(case))
        return lines

    def _conditions(self, result: Result, start: int, end: int, quiet_us: int) -> list[Line]:
        """Lines for what is wrong with the audit itself since this window, and for what is over."""
        now = {
            f"STALLED:{entry['input']}": f"{entry['input']} ends before this window does"
            for entry in result.inputs
            if entry["watermark_us"] < end and result.totals.get("committed")
        }
        if not quiet_us:
            now |= {f"INCONCLUSIVE:{_kind(reason)}": reason for reason in result.reasons[:MOST_REASONS]}
        elif end - quiet_us >= QUIET_SECONDS * 1e6:
            now["INCONCLUSIVE:quiet"] = f"no input has had anything to audit for {(end - quiet_us) / 3.6e9:.1f} h"
        before = self._ledger.conditions()
        lines = []
        for key in sorted(now.keys() - before):
            self._ledger.set_condition(key, start)
            kind = "stalled" if key.startswith("STALLED:") else "inconclusive"
            lines.append({"kind": kind, "window_us": start, "key": f"{key}:{start}", "detail": now[key]})
        for key in sorted(before - now.keys()):
            if quiet_us and key.startswith("INCONCLUSIVE:"):
                continue  # nothing shows that it is over
            self._ledger.end_condition(key)
            lines.append({"kind": "over", "window_us": start, "key": key, "detail": f"no longer: {key}"})
        return lines

    def _is_alarm(self, line: Line) -> bool:
        return line["kind"] in ("stalled", "inconclusive") or (
            line["kind"] == "finding" and self._fails(line["finding"])
        )

    def _fails(self, name: str) -> bool:
        """Whether findings of a class fail an audit by this plan."""
        return BY_NAME[name].is_bad or name in self._plan.fail_on

    def _announce(self, lines: Sequence[Line]) -> None:
        """Put lines on their way, within the ledger's transaction."""
        self._ledger.add_lines(lines)
        for line in lines:
            if self._is_alarm(line):
                self._alarms.add(line["key"], line)

    def _say(self, lines: Sequence[Line], last: Line) -> None:
        self._lines.write()
        for line in lines:
            if self._is_alarm(line):
                self._alarms.say(line)
            self._emit(line)
        self._emit(last)

    # --- windows that are audited again -----------------------------------------------------------------------

    def _due(self) -> list[Waiting]:
        """Windows that follow each other and are due to be audited again; none if that was done a moment ago."""
        position = self.position
        if position.window - position.rechecked < RECHECK_EVERY:
            return []
        chosen: list[Waiting] = []
        for window in self._ledger.due(position.window):
            if chosen and window.from_us != chosen[-1].to_us:
                break
            chosen.append(window)
            if len(chosen) == RECHECKED_AT_ONCE:
                break
        return chosen

    def _revised(self, result: Result, windows: Sequence[Waiting]) -> list[Line]:
        """Lines for findings that are new, or no longer apply, in windows that were audited again."""
        lines = self._findings(result.found, windows[0].from_us, windows[-1].to_us)
        keys = {f.key for f in result.found if not f.evidence.get("repaired")}
        for window in windows:
            said = self._ledger.said_of(window.from_us)
            for key in sorted(said - keys):
                name = key.partition(":")[0]
                # An audit that doubts itself may not see what is there nevertheless.
                if name in REVISED and not result.reasons:
                    said.discard(key)
                    self._ledger.revise(key)
                    REVISIONS.labels(name).inc()
                    lines.append(
                        {"kind": "revision", "window_us": window.from_us, "finding": name, "key": key,
                         "detail": "the finding no longer applies"}
                    )  # fmt: skip
            turn = window.turn + 1
            if turn >= len(RECHECKS) or not said:
                self._ledger.done_waiting(window.from_us)
            else:
                self._ledger.wait(replace(window, turn=turn, due=self.position.window + RECHECKS[turn]))
        return lines


def tell_failure(directory: Path, alarm_url: str, error: Exception) -> None:
    """The alarm of a watch that ends, or does not begin: once for its next window. Raises what `Watch` does."""

    def audit(plan: Plan) -> Result:
        raise error

    with closing(Watch(audit, Plan(), directory, alarm_url=alarm_url)) as watch:
        watch.failed(error)


def _kind(reason: str) -> str:
    """A reason without its times and counts: the same with others is no news. Digits of names stay."""
    return _NUMBER.sub("#", _INSTANT.sub("#", reason))


def _window_line(result: Result, start: int) -> Line:
    return {
        "kind": "window", "window_us": start, "verdict": result.verdict,
        "counts": {name: count for name, count in result.counts.items() if count},
        "committed": result.totals.get("committed", 0), "seconds": result.seconds,
        "reasons": result.reasons[:MOST_REASONS],
    }  # fmt: skip


def _is_quiet(result: Result) -> bool:
    """Whether no input had anything in the window: an audit of it says no more than that."""
    return bool(result.reasons) and not any(result.totals.values()) and not result.found


def _is_transient(error: Exception) -> bool:
    """Whether to try again: a database or a disk may have gone away during the audit."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, NotifyError | OSError) or library in ("pyspark", "py4j", "sqlalchemy", "sqlite3")
