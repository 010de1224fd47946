"""Rounds: in each of them every system does all of the work once, one system after the other.

Only one system's server runs at a time, since an idle RocketMQ broker keeps up to a core busy after transactions. Each
round begins with another system, as the machine changes with time.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from notify.errors import NotifyError
from notify.testing.reachable import NotAvailable
from tools.bench.peers import machine
from tools.bench.peers.system import Run, System, Work

T = TypeVar("T")
FAILURES = (NotifyError, NotAvailable, OSError, subprocess.SubprocessError, psycopg.Error)
"""A system that cannot run raises one of these. Anything else is a fault of the bench."""


@dataclass(slots=True)
class Measured:
    """One system in one round. `reason` says why steps are missing, where some are."""

    figures: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    reason: str = ""

    def add(self, run: Run) -> None:
        self.figures |= run.figures
        self.lost += run.lost
        self.doubled += run.doubled

    def as_json(self) -> dict[str, Any]:
        figures = {name: round(value, 4) for name, value in self.figures.items()}
        return figures | {"lost": self.lost, "doubled": self.doubled} | ({"reason": self.reason} if self.reason else {})


@dataclass(slots=True)
class Round:
    """All systems in one round, by name, in the order in which they ran."""

    number: int
    fdatasync_ms: float
    load_average: float
    systems: dict[str, Measured] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "round": self.number,
            "fdatasync_ms": round(self.fdatasync_ms, 3),
            "load_average": round(self.load_average, 2),
            **{name: measured.as_json() for name, measured in self.systems.items()},
        }


def order(systems: Sequence[T], number: int) -> list[T]:
    """The systems in a round, counted from 1: each round begins with the next one."""
    first = (number - 1) % max(len(systems), 1)
    return [*systems[first:], *systems[:first]]


def measure(systems: Sequence[System], work: Work, count: int, tell: Callable[[str], None]) -> Iterator[Round]:
    """Yield each round once it is done."""
    for number in range(1, count + 1):
        with _room() as directory:
            done = Round(number, machine.fdatasync_ms(Path(directory)), os.getloadavg()[0])
        for system in order(systems, number):
            done.systems[system.name] = _measured(system, work, f"round {number} of {count}, {system.title}", tell)
        yield done


def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="notify-peers-", ignore_cleanup_errors=True)


def _measured(system: System, work: Work, label: str, tell: Callable[[str], None]) -> Measured:
    """The figures of one system; a failure ends its round, not the others'."""
    measured = Measured()
    name = "its start"
    try:
        with _room() as directory, system.started(Path(directory), work) as running:
            running.warm_up()
            for step in running.steps():
                name = step.name
                run = step.run()
                measured.add(run)
                tell(f"{label}, {name}: {_in_words(run)}")
    except FAILURES as error:
        measured.reason = f"{name}: {str(error) or type(error).__name__}"
        tell(f"{label}, not measured from here on: {measured.reason}")
    return measured


def _in_words(run: Run) -> str:
    figures = ", ".join(f"{name} {value:,.6g}" for name, value in run.figures.items())
    wrong = f", LOST {run.lost}, DOUBLED {run.doubled}" if run.lost or run.doubled else ""
    return figures + wrong + (f" ({run.remark})" if run.remark else "")
