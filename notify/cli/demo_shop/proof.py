"""The result of a demo: a verdict, and counts from its databases and servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notify.cli.demo_shop.end import POINTS, Lost


class DemoFailed(Exception):
    """The demo cannot continue; `str()` is one line that says why."""


@dataclass(slots=True)
class Proof:
    """The counts of a run. `ok` is the verdict; `reasons` says why the verdict is FAIL."""

    attempts: int = 0
    committed: int = 0
    not_committed: int = 0
    effects: int = 0
    exactly_once: int = 0
    missing: int = 0
    doubled: int = 0
    ghosts: int = 0
    undecided: int = 0
    killed: dict[str, int] = field(default_factory=lambda: {"producer": 0, "consumer": 0})
    """How often the conductor killed each kind of process, at random moments."""
    killed_at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS.values(), 0))
    """How often producers killed themselves at each point, by the point's description."""
    in_doubt: dict[str, int] = field(default_factory=dict)
    """How many transactions check-back resolved to each state."""
    lost: list[Lost] = field(default_factory=list)
    """The transactions whose producer killed itself before it sent the outcome."""
    redelivered: int = 0
    seconds: float = 0.0
    audit: dict[str, Any] | None = None
    """The result of `notify audit`, if the run had an audit."""
    proved: bool = False
    """Whether the run reached the proof."""
    failure: str = ""
    """One line that says why the run did not reach the proof, or did not settle."""
    stderr: dict[str, list[str]] = field(default_factory=dict)
    """The last lines of output of each process and part."""
    directory: str = ""
    """The directory of the run's files, if the run failed."""

    @property
    def resolved_by_check(self) -> int:
        """The number of transactions that an answer to a check decided, by the servers' record."""
        return sum(self.in_doubt.values())

    def reasons(self) -> list[str]:
        """Texts that say why the verdict is FAIL; empty for PASS."""
        if not self.proved:
            return [self.failure or "there is no proof yet"]
        counts = {
            "committed orders have no effect": self.missing,
            "orders took effect more than once": self.doubled,
            "effects belong to orders that never committed": self.ghosts,
            "transactions are undecided": self.undecided,
        }
        reasons = [self.failure] if self.failure else []
        reasons += [f"{count:,} {fault}" for fault, count in counts.items() if count]
        if not self.committed:
            reasons.append("no order was committed")
        if not self.resolved_by_check:
            reasons.append("check-back resolved no transaction")
        reasons += [f"no {name} was killed" for name, times in self.killed.items() if not times]
        if self.audit is not None and self.audit.get("verdict") != "PASS":
            reasons.append(f"the audit says {self.audit.get('verdict')}")
        if not reasons and not self.effects == self.committed == self.exactly_once:
            reasons.append(f"{self.effects:,} effects do not match {self.committed:,} orders")
        return reasons

    @property
    def ok(self) -> bool:
        return not self.reasons()
