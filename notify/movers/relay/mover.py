"""The protocol that moves a page of an outbox to a target, and the counts of a relay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from notify.client.tables.outbox import Outbox
from notify.errors import Unavailable


@dataclass(slots=True)
class Relayed:
    """Counts of transactions. Refused transactions stay in their table, and are on the list of refused messages."""

    sent: int = 0
    refused: int = 0


class MovesElsewhere(Unavailable):
    """Another relay moves what this source has; other sources are not concerned."""


class Mover(Protocol):
    """Moves transactions to one kind of target."""

    async def move(self, outbox: Outbox) -> bool:
        """Read, send and mark transactions; False if nothing is left to move.

        Raises Unavailable if the source or the target is unreachable, Backpressure if the target accepts nothing for
        now, MovesElsewhere if another relay moves what this source has.
        """
        ...

    async def rest(self) -> None:
        """Show the target that this relay runs although it has nothing to move. No database is asked."""
        ...
