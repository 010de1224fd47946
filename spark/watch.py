"""Auditing continuously: one window of time after the other, each in batch, by this machine's own clock.

Not a stream-stream join: its watermark is the slower side's, so an input that stalls freezes it, and what was lost
never comes out, just when it matters. Here a window is looked at when it is over and its transactions must be through,
whatever the inputs say; what comes later after all revises the finding.

The state is a directory: `findings.jsonl`, one line a finding or revision, and `state.json`, where to go on. A line is
durable before the state moves on. So a watch that is killed looks at its last window again, and knows from the lines
what it has said of it.
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
"""So many windows later a window with findings is looked at again: what came late revises them."""
MOST_RECHECKS = 50
"""Windows that wait to be looked at again; with more, the oldest keep their findings."""
RETRY_SECONDS = 5.0
REVISED = ("LOST", "IN_DOUBT", "UNDELIVERED", "ACKED_NO_EFFECT", "CONFLICT", "GHOST", "ORPHAN_ROW")

WINDOWS = Counter("notify_audit_windows", "Windows that were audited.")
FINDINGS = Counter("notify_audit_findings", "Findings, by class.", ["finding"])
REVISIONS = Counter("notify_audit_revisions", "Findings that turned out to be none after all.", ["finding"])
FAILURES = Counter("notify_audit_failures", "Windows that could not be audited when they were due, and were again.")
CLOSED = Gauge("notify_audit_closed_timestamp_seconds", "Up to when everything was audited.")
SECONDS = Gauge("notify_audit_window_seconds", "How long the last window took.")


@dataclass
class Waiting:
    """A window with findings that will be looked at again."""

    from_us: int
    to_us: int
    turn: int = 0
    due: int = 0
    """Number of the window behind which it is its turn."""


@dataclass
class State:
    """Where a watch stands; state.json."""

    next_us: int
    window: int = 0
    waiting: list[Waiting] = field(default_factory=list)


@dataclass(frozen=True)
class Auditing:
    """Carries out the plan of a window. `inputs` opens them anew for each; `scratch` keeps copies of the log."""

    spark: SparkSession
    inputs: Callable[[], AbstractContextManager[Inputs]]
    scratch: Path

    def __call__(self, plan: Plan) -> Result:
        with self.inputs() as inputs:
            return Audit(self.spark, plan, inputs, self.scratch).run()


class Watch:
    """Has windows audited as they close. `emit` gets each line as a mapping."""

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
        """`audit`: see `Auditing`. `plan.from_us`: where to begin; default: now."""
        if window_seconds < 1:
            raise InvalidRequest("--window-seconds is 1 or more")
        self._audit = audit
        self._plan = replace(plan, closes_by_clock=True)
        self._directory = directory
        self._window_us = round(window_seconds * 1e6)
        self._emit = emit
        self._alarm_url = alarm_url
        self._clock = clock
        self._said: dict[int, set[str]] = {}
        """Keys of what was said, by the start of the window."""
        self.state = self._resumed()
        self._delay_us = round(max(plan.max_transaction_seconds, plan.deliver_seconds) * 1e6)

    # --- state ------------------------------------------------------------------------------------------------

    def _resumed(self) -> State:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "state.json"
        if not path.exists():
            # Kept before the first window is audited: one that is killed in it begins with the same window again.
            start = self._plan.from_us or int(self._clock() * 1e6)
            self._lines().touch()
            self._save(State(start // self._window_us * self._window_us))
        found = json.loads(path.read_text())
        waiting = [Waiting(**w) for w in found["waiting"]]
        state = State(found["next_us"], found["window"], waiting)
        wanted = {state.next_us} | {w.from_us for w in waiting}
        for line in self._whole_lines():
            if line["window_us"] in wanted:
                keys = self._said.setdefault(line["window_us"], set())
                (keys.discard if line["kind"] == "revision" else keys.add)(line["key"])
        return state

    def _lines(self) -> Path:
        return self._directory / "findings.jsonl"

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Every line; one that a kill cut short is taken away, since its window is looked at again."""
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
        """Until `stop`, or so many windows were audited. Raises InvalidRequest for what waiting would not mend."""
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
                # The window stays due: an input that is away must not let one pass unseen.
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
        """Lines for what was not said before; and whether anything is there that may be revised."""
        said = self._said.setdefault(start, set())
        lines = []
        for found in result.found:
            if found.finding in ("PENDING", "REDELIVERED") or found.evidence.get("repaired") or found.key in said:
                continue
            said.add(found.key)
            FINDINGS.labels(found.finding).inc()
            lines.append({"kind": "finding", "window_us": start} | row_of(found))
        return lines, bool(said)

    def _again(self) -> None:
        """Look at one window again whose turn it is: what came late is no finding any more."""
        state = self.state
        due = [w for w in state.waiting if w.due <= state.window]
        if not due:
            return
        window = due[0]
        result = self._audited(window.from_us, window.to_us)
        lines, _ = self._new(result, window.from_us)
        there = {f.key for f in result.found if not f.evidence.get("repaired")}
        said = self._said[window.from_us]
        for key in sorted(said - there):
            name = key.partition(":")[0]
            if name in REVISED:
                said.discard(key)
                REVISIONS.labels(name).inc()
                lines.append(
                    {"kind": "revision", "window_us": window.from_us, "finding": name, "key": key,
                     "detail": "it is there now"}
                )  # fmt: skip
        self._say(lines)
        window.turn += 1
        if window.turn >= len(RECHECKS) or not said:
            state.waiting.remove(window)
            self._said.pop(window.from_us, None)
        else:
            window.due = state.window + RECHECKS[window.turn]


def _is_transient(error: Exception) -> bool:
    """Whether to try again: a database or a disk may have gone away while a window was looked at."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, NotifyError | OSError) or library in ("pyspark", "py4j", "sqlalchemy")
