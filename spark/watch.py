"""A continuous audit: one time window after the other, each in batch, by this machine's clock.

It is no stream-stream join, because the watermark of such a join is that of its slower input: an input that stalls
would stop it and so hide lost messages. Instead a window is audited once this machine's clock says that its
transactions must be over, whatever the inputs say. A message that arrives later revises the finding.

The state is a directory with `findings.jsonl`, one line for each finding or revision, and `state.json`, the next
window. Lines are durable before the state moves on. A watch that was killed audits its last window again, and knows
from the lines which findings it has already reported.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge
from pyspark.sql import SparkSession

from notify.errors import InvalidRequest, NotifyError
from notify.spark.audit import Audit
from notify.spark.findings import BY_NAME
from notify.spark.report.files import row_of
from notify.spark.result import Inputs, Plan, Result

log = logging.getLogger("notify.audit")

RECHECKS = (2, 4, 8, 16)
"""A window with findings is audited again after so many further windows; messages that came late revise them."""
MOST_RECHECKS = 50
"""The most windows that wait to be audited again; beyond that the oldest keep their findings."""
RETRY_SECONDS = 5.0
REVISED = ("LOST", "IN_DOUBT", "UNDELIVERED", "ACKED_NO_EFFECT", "CONFLICT", "GHOST", "ORPHAN_ROW")

WINDOWS = Counter("notify_audit_windows", "Windows that were audited.")
FINDINGS = Counter("notify_audit_findings", "Findings, by class.", ["finding"])
REVISIONS = Counter("notify_audit_revisions", "Findings that a later audit revised.", ["finding"])
FAILURES = Counter("notify_audit_failures", "Failed attempts to audit a window.")
CLOSED = Gauge("notify_audit_closed_timestamp_seconds", "The end of the last audited window, in seconds since 1970.")
SECONDS = Gauge("notify_audit_window_seconds", "How long the audit of the last window took.")


@dataclass
class Waiting:
    """A window with findings that will be audited again."""

    from_us: int
    to_us: int
    turn: int = 0
    due: int = 0
    """The number of the window after which it is audited again."""


@dataclass
class State:
    """The position of a watch; state.json holds it."""

    next_us: int
    window: int = 0
    waiting: list[Waiting] = field(default_factory=list)


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
    """Audits windows as they close. `emit` is called with each line, a mapping."""

    def __init__(
        self,
        audit: Callable[[Plan], Result],
        plan: Plan,
        directory: Path,
        *,
        window_seconds: float = 60.0,
        emit: Callable[[dict[str, Any]], None] = lambda line: None,
        alarm_url: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`audit`: see `Auditing`. `plan.from_us`: the start of the first window; 0: now."""
        if window_seconds < 1:
            raise InvalidRequest("--window-seconds must be at least 1")
        self._audit = audit
        self._plan = replace(plan, closes_by_clock=True)
        self._directory = directory
        self._window_us = round(window_seconds * 1e6)
        self._emit = emit
        self._alarm_url = alarm_url
        self._clock = clock
        self._said: dict[int, set[str]] = {}
        """Keys of the reported findings, by the start of their window."""
        self.state = self._resumed()
        self._delay_us = round(max(plan.max_transaction_seconds, plan.deliver_seconds) * 1e6)

    # --- state ------------------------------------------------------------------------------------------------

    def _resumed(self) -> State:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "state.json"
        if not path.exists():
            # Saved before the first audit, so that a watch killed during it starts with the same window again.
            start = self._plan.from_us or int(self._clock() * 1e6)
            self._lines().touch()
            self._save(State(start // self._window_us * self._window_us))
        saved = json.loads(path.read_text())
        waiting = [Waiting(**w) for w in saved["waiting"]]
        state = State(saved["next_us"], saved["window"], waiting)
        wanted = {state.next_us} | {w.from_us for w in waiting}
        for line in self._whole_lines():
            if line["window_us"] in wanted:
                keys = self._said.setdefault(line["window_us"], set())
                (keys.discard if line["kind"] == "revision" else keys.add)(line["key"])
        return state

    def _lines(self) -> Path:
        return self._directory / "findings.jsonl"

    def _whole_lines(self) -> list[dict[str, Any]]:
        """All lines. A line that a kill cut short is removed: its window is audited again."""
        path = self._lines()
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with path.open("r+b") as file:
                file.truncate(end)
        return [json.loads(line) for line in data[:end].splitlines()]

    def _say(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        with self._lines().open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        for line in lines:
            self._emit(line)
            if line["kind"] == "finding" and BY_NAME[line["finding"]].is_bad:
                self._alarm(line)

    def _save(self, state: State) -> None:
        plain = {"next_us": state.next_us, "window": state.window, "waiting": [vars(w) for w in state.waiting]}
        path = self._directory / "state.json"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(plain, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def _alarm(self, line: dict[str, Any]) -> None:
        log.error("%s %s: %s", line.get("finding", line["kind"]), line.get("message_id", ""), line.get("detail", ""))
        if not self._alarm_url:
            return
        request = urllib.request.Request(
            self._alarm_url, json.dumps(line).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5):
                pass
        except OSError as error:
            log.warning("the alarm did not reach %s: %s", self._alarm_url, error)

    # --- windows ----------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, windows: int = 0) -> None:
        """Audit windows until `stop`, or so many (0: no limit). Raises InvalidRequest for a wrong plan or input."""
        done = 0
        while not stop.is_set() and not (windows and done >= windows):
            due = (self.state.next_us + self._window_us + self._delay_us) / 1e6
            while (wait := due - self._clock()) > 0:
                if stop.wait(min(wait, 0.5)):
                    return
            try:
                self._next()
                done += 1
            except InvalidRequest:
                raise
            except Exception as error:
                # The window stays due: no window is skipped because an input is away.
                FAILURES.inc()
                cause = str(error).splitlines()[0][:300] if str(error) else repr(error)
                self._alarm({"kind": "failure", "detail": cause})
                self._emit({"kind": "failure", "window_us": self.state.next_us, "detail": cause})
                if not _is_transient(error):
                    raise
                if stop.wait(RETRY_SECONDS):
                    return

    def _next(self) -> None:
        state = self.state
        start, end = state.next_us, state.next_us + self._window_us
        result = self._audited(start, end)
        lines, has_bad = self._new(result, start)
        stalled = [
            {"kind": "stalled", "window_us": start, "detail": f"{e['input']} ends before this window does"}
            for e in result.inputs
            if e["watermark_us"] < end and result.totals.get("committed")
        ]
        self._say(lines + [s | {"key": s["detail"]} for s in stalled])
        for line in stalled:
            self._alarm(line)
        if has_bad:
            state.waiting.append(Waiting(start, end, 0, state.window + RECHECKS[0]))
            del state.waiting[:-MOST_RECHECKS]
        else:
            self._said.pop(start, None)
        self._again()
        state.next_us, state.window = end, state.window + 1
        self._save(state)
        WINDOWS.inc()
        CLOSED.set(end / 1e6)
        SECONDS.set(result.seconds)
        counts = {name: count for name, count in result.counts.items() if count}
        self._emit(
            {"kind": "window", "window_us": start, "verdict": result.verdict, "counts": counts,
             "committed": result.totals.get("committed", 0), "seconds": result.seconds}
        )  # fmt: skip

    def _audited(self, start: int, end: int) -> Result:
        return self._audit(replace(self._plan, from_us=start, to_us=end))

    def _new(self, result: Result, start: int) -> tuple[list[dict[str, Any]], bool]:
        """Lines for the findings not reported yet; and whether the window has findings that may be revised."""
        said = self._said.setdefault(start, set())
        lines = []
        for case in result.found:
            if case.finding in ("PENDING", "REDELIVERED") or case.evidence.get("repaired") or case.key in said:
                continue
            said.add(case.key)
            FINDINGS.labels(case.finding).inc()
            lines.append({"kind": "finding", "window_us": start} | row_of(case))
        return lines, bool(said)

    def _again(self) -> None:
        """Audit one waiting window again if one is due; findings whose messages came late are revised."""
        state = self.state
        due = [w for w in state.waiting if w.due <= state.window]
        if not due:
            return
        window = due[0]
        result = self._audited(window.from_us, window.to_us)
        lines, _ = self._new(result, window.from_us)
        keys = {f.key for f in result.found if not f.evidence.get("repaired")}
        said = self._said[window.from_us]
        for key in sorted(said - keys):
            name = key.partition(":")[0]
            if name in REVISED:
                said.discard(key)
                REVISIONS.labels(name).inc()
                lines.append(
                    {"kind": "revision", "window_us": window.from_us, "finding": name, "key": key,
                     "detail": "the finding no longer applies"}
                )  # fmt: skip
        self._say(lines)
        window.turn += 1
        if window.turn >= len(RECHECKS) or not said:
            state.waiting.remove(window)
            self._said.pop(window.from_us, None)
        else:
            window.due = state.window + RECHECKS[window.turn]


def _is_transient(error: Exception) -> bool:
    """Whether to try again: a database or a disk may have gone away during the audit."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, NotifyError | OSError) or library in ("pyspark", "py4j", "sqlalchemy")
