"""The result of a demo: counts and a verdict. Every count is taken from a database or a server, none is assumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notify.demo.end import POINTS, Lost


class DemoFailed(Exception):
    """The demo cannot go on; `str()` is one line that says why."""


@dataclass(slots=True)
class Proof:
    """`ok` is the verdict; `reasons` says what stands against it."""

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
    """How often the conductor killed one of a kind, at a random moment."""
    killed_at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POINTS.values(), 0))
    """How often a producer killed itself at a point, in words."""
    in_doubt: dict[str, int] = field(default_factory=dict)
    """The outcomes of the transactions that were resolved by asking back."""
    lost: list[Lost] = field(default_factory=list)
    """Those among them whose producer killed itself before it sent the outcome."""
    redelivered: int = 0
    seconds: float = 0.0
    audit: dict[str, Any] | None = None
    """The verdict of `notify audit`, where it was asked."""
    proved: bool = False
    """Whether the run came as far as the proof."""
    failure: str = ""
    """Why it did not, or why it did not settle, in one line."""
    stderr: dict[str, list[str]] = field(default_factory=dict)
    """The last lines that each process and each part wrote."""
    directory: str = ""
    """Where the run's files are left; only where it failed."""

    @property
    def resolved_by_check(self) -> int:
        """Transactions decided by the answer to a check, by the servers' own record."""
        return sum(self.in_doubt.values())

    def reasons(self) -> list[str]:
        """Why the verdict is FAIL, in words; empty where it is PASS."""
        if not self.proved:
            return [self.failure or "there is no proof yet"]
        counts = {
            "committed orders have no effect": self.missing,
            "orders took effect more than once": self.doubled,
            "effects belong to orders that never committed": self.ghosts,
            "transactions are undecided": self.undecided,
        }
        reasons = [self.failure] if self.failure else []
        reasons += [f"{count:,} {what}" for what, count in counts.items() if count]
        if not self.committed:
            reasons.append("no order was committed")
        if not self.resolved_by_check:
            reasons.append("no transaction was resolved by asking back")
        reasons += [f"no {name} was killed" for name, times in self.killed.items() if not times]
        if self.audit is not None and self.audit.get("verdict") != "PASS":
            reasons.append(f"the audit says {self.audit.get('verdict')}")
        if not reasons and not self.effects == self.committed == self.exactly_once:
            reasons.append(f"{self.effects:,} effects of {self.committed:,} orders do not fit together")
        return reasons

    @property
    def ok(self) -> bool:
        return not self.reasons()
