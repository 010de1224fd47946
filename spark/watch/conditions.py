"""Conditions of an audit itself: an input that stalls, reasons why nothing can be judged, and silence.

Each condition is reported when it begins and when it ends, even if its times and counts change in between.
"""

from __future__ import annotations

import re

from notify.spark.result import Result
from notify.spark.times import instant_text
from notify.spark.watch.ledger import Ledger
from notify.spark.watch.lines import Line

QUIET_SECONDS = 3600.0
"""A watch without anything to audit for this long raises an alarm: nothing was sent, or all inputs are empty."""
MOST_REASONS = 20
_CLOCK = "CLOCK"

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.\d]*Z?")
_NAMED = "".join(f"(?<!{noun} )" for noun in ("database", "group", "groups", "log", "source", "storage", "topic"))
_NUMBER = re.compile(rf"{_NAMED}(?<![\w.-])\d[\d,]*(\.\d+)?(?![\w-]|\.\w)")


class Conditions:
    """Compares a window's result with the conditions that the ledger has. Call it within the ledger's transaction."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def lines(self, result: Result, start: int, end: int, quiet_us: int) -> list[Line]:
        """Lines for conditions that began in this window, and for those that ended. `quiet_us`: since when there was
        nothing to audit; 0: there was something."""
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
        lines: list[Line] = []
        for key in sorted(now.keys() - before):
            self._ledger.set_condition(key, start)
            self._ledger.know(_again(key), start, self._window)
            kind = "stalled" if key.startswith("STALLED:") else "inconclusive"
            lines.append({"kind": kind, "window_us": start, "key": f"{key}:{start}", "detail": now[key]})
        for key in sorted(before - now.keys()):
            if quiet_us and key.startswith("INCONCLUSIVE:"):
                continue  # it is unknown whether it has ended
            self._ledger.end_condition(key)
            lines.append({"kind": "over", "window_us": start, "key": key, "detail": f"no longer: {key}"})
        return lines

    def behind(self, start: int, now_us: int) -> list[Line]:
        """Lines for a clock that is far behind the audited windows: once, until a window is audited again."""
        if _CLOCK in self._ledger.conditions():
            return []
        self._ledger.set_condition(_CLOCK, start)
        detail = (
            f"this machine's clock says {instant_text(now_us)}, and the next window begins at {instant_text(start)}: "
            "nothing is audited until then. If the clock was ahead before, end the watch, move watch.db elsewhere, "
            "and begin with --from"
        )
        return [{"kind": "inconclusive", "window_us": start, "key": f"{_CLOCK}:{start}", "detail": detail}]

    def doubts(self, result: Result, start: int) -> list[Line]:
        """Lines for reasons why earlier windows, from `start` on, cannot be judged any more, if no audit of this watch
        had them before."""
        lines: list[Line] = []
        for reason in [] if is_quiet(result) else result.reasons[:MOST_REASONS]:
            key = _again(f"INCONCLUSIVE:{_kind(reason)}")
            if not self._ledger.is_known(key):
                self._ledger.know(key, start, self._window)
                lines.append({"kind": "inconclusive", "window_us": start, "key": key, "detail": reason})
        return lines

    @property
    def _window(self) -> int:
        position = self._ledger.position
        assert position is not None
        return position.window


def is_quiet(result: Result) -> bool:
    """Whether no input had anything in the window: an audit of it says no more than that."""
    return bool(result.reasons) and not any(result.totals.values()) and not result.found


def _again(key: str) -> str:
    """The key of a window's condition for later looks at the window."""
    return f"AGAIN:{key}"


def _kind(reason: str) -> str:
    """A reason without its times and counts, because the same reason with others is not news. Digits of names stay."""
    return _NUMBER.sub("#", _INSTANT.sub("#", reason))
