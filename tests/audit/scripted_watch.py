"""A watch over made-up audits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notify.spark.result import Plan, Result
from notify.spark.watch.watching import Watch

SECOND = 1_000_000
BEGIN_US = 1_700_000_000 * SECOND


class Scripted:
    """A watch of which each window's result is made by a function of its start."""

    def __init__(
        self,
        state: Path,
        made: Callable[[int], Result],
        alarm_url: str = "",
        seconds: float = 1.0,
        fail_on: tuple[str, ...] = (),
    ) -> None:
        self.said: list[dict[str, Any]] = []
        self.plans: list[Plan] = []
        """The plans of all audits."""
        self._made = made
        self.watch = Watch(
            self._audit, Plan(BEGIN_US, 0, 1, 1, fail_on=fail_on), state, window_seconds=seconds,
            emit=self.said.append, alarm_url=alarm_url,
        )  # fmt: skip

    def _audit(self, plan: Plan) -> Result:
        self.plans.append(plan)
        return self._made(plan.from_us)

    @property
    def audits(self) -> int:
        return len(self.plans)

    def run(self, windows: int) -> Scripted:
        with contextlib.closing(self.watch):
            self.watch.run(threading.Event(), windows)
        return self

    def kinds(self) -> list[str]:
        return [line["kind"] for line in self.said if line["kind"] != "window"]


class Hurried(threading.Event):
    """A stop event that does not wait for an input to come back."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()
