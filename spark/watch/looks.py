"""Audits windows again: for faults since the first audit, and for messages that were not decided then.

A window is audited once, soon after its end. A message that is still on its way then, an effect that is deleted later,
or a queue that is cut later, is found by another look. Three looks follow the watch: SOON after, LATER, and ROUND,
which goes through everything that is retained and then begins again. Each audits several windows at once, and at most
one of them follows an audit of a window: 13 more audits in 24 windows.
"""

from __future__ import annotations

from dataclasses import dataclass

from notify.spark.watch.ledger import Ledger, Position, Progress


@dataclass(frozen=True, slots=True)
class Look:
    """It follows the watch `behind` windows back, and audits `at_once` windows, once in `every` windows at most."""

    name: str
    behind: int
    at_once: int
    every: int
    begins_again: bool = False
    """Whether it begins again at its end. If too few windows are left there, they are audited in the next round."""

    def turn(self, at: Progress, position: Position, window_us: int, oldest_us: int) -> Turn | None:
        """The range to audit now; None: nothing. `oldest_us`: older data is not retained."""
        if position.window - at.window < self.every:
            return None
        end_us = position.next_us - self.behind * window_us
        oldest_us = -(-oldest_us // window_us) * window_us  # a window that is retained in part cannot be judged
        length_us, start_us = self.at_once * window_us, max(at.next_us, oldest_us)
        if self.begins_again and end_us - start_us < length_us:
            start_us = max(at.begin_us, oldest_us)
        is_first = start_us == max(at.begin_us, oldest_us)
        return Turn(at, start_us, start_us + length_us, is_first) if end_us - start_us >= length_us else None


@dataclass(frozen=True, slots=True)
class Turn:
    """The range [from_us, to_us) that a look audits next, in microseconds since 1970. `at`: how far it was. `is_first`:
    it is the oldest that there is to audit."""

    at: Progress
    from_us: int
    to_us: int
    is_first: bool


SOON = Look("soon", behind=1, at_once=3, every=3)
LATER = Look("later", behind=24, at_once=24, every=24)
ROUND = Look("round", behind=48, at_once=24, every=6, begins_again=True)
LOOKS = (SOON, LATER, ROUND)
"""The first look with a range to audit is due."""


def due(ledger: Ledger, position: Position, window_us: int, oldest_us: int) -> Turn | None:
    """The look that is due now, if any."""
    for look in LOOKS:
        at = ledger.look(look.name)
        if at is not None and (turn := look.turn(at, position, window_us, oldest_us)) is not None:
            return turn
    return None


def begin(ledger: Ledger, begin_us: int) -> None:
    """Let the looks that did not begin yet begin at an instant. Within the ledger's transaction."""
    for look in LOOKS:
        if ledger.look(look.name) is None:
            ledger.move_look(Progress(look.name, begin_us, begin_us))
