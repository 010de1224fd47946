"""The work that every system does, and what its module offers for it: a server that runs, and steps that measure it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BODY = 256


@dataclass(frozen=True, slots=True)
class Work:
    """The same for all systems. Bodies have 256 bytes, and every write is on the disk before it is acknowledged.

    `seconds` is the length of a run, `pace` the transactions a second at which latencies are measured, with
    `paced_callers`. `pile` messages are drained by one group, `fan_out` messages by each of `groups`. Notify's handlers
    are called for `handled` deliveries in all.
    """

    callers: tuple[int, ...] = (1, 32, 128, 1024)
    seconds: float = 6.0
    pace: int = 2000
    paced_callers: int = 64
    pile: int = 300_000
    fan_out: int = 50_000
    groups: int = 15
    handled: int = 75_000


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one verified run by their names, and what its verification found."""

    figures: dict[str, float]
    lost: int
    doubled: int
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One run, and its name for people."""

    name: str
    run: Callable[[], Run]


class Running(Protocol):
    """A system whose server runs."""

    def warm_up(self) -> None:
        """Do work that is not counted, until compilers and caches have what they need."""

    def steps(self) -> list[Step]:
        """The runs to measure, in their order."""


class System(Protocol):
    """A system that can be measured."""

    name: str
    title: str

    def version(self) -> str:
        """The measured version. Raises Unavailable with the reason where the system cannot run here."""

    def started(self, directory: Path, work: Work) -> AbstractContextManager[Running]:
        """Start the server with its data in a directory, and stop it at the end. Raises Unavailable."""


class Measurable(Protocol):
    """The runs that all systems have."""

    def transactions(self, callers: int) -> Run:
        """Figures `recorded_N`, `visible_N` and `settled_N`: transactions a second of N callers.

        Recorded: acknowledged to a caller. Visible: committed, so that a consumer could get them when the callers
        stopped. Settled: all of them, by the time until the last was visible.
        """

    def paced(self) -> Run:
        """Figures `paced`, `end_to_end_p50` and `end_to_end_p99` (ms): from the commit to the handler."""

    def drain(self) -> Run:
        """Figure `drain`: messages a second of one group over a pile."""

    def fan_out(self) -> Run:
        """Figure `fan_out`: deliveries a second of all groups together."""


def usual_steps(running: Measurable, work: Work) -> list[Step]:
    """The steps that all systems have."""

    def with_callers(callers: int) -> Step:
        return Step(f"{callers:,} caller{'s' * (callers > 1)}", lambda: running.transactions(callers))

    return [
        *map(with_callers, work.callers),
        Step(f"{work.pace:,} transactions/s", running.paced),
        Step(f"a pile of {work.pile:,}", running.drain),
        Step(f"fan-out 1:{work.groups}", running.fan_out),
    ]
