"""A cause: findings of one class that have one origin and follow each other in time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Instants are in microseconds since 1970; 0: not known."""

    finding: str
    """The class of its findings; INCONCLUSIVE for what keeps the audit from judging."""
    sentence: str
    count: int
    """How many findings it stands for; 0: no message of it is known."""
    subject: str
    """Whose they are: `group points`, `producer group bank of shop`, `log data`."""
    from_us: int
    to_us: int
    fails: bool
    """Whether it fails the audit."""
    message_id: str
    """Its first message; "" if it has none."""
    commands: tuple[str, ...] = ()
    """Commands to copy, in the order in which to run them."""
