"""The protocol that moves a page of an outbox to a target, and the counts of a relay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from notify.outbox import Outbox


@dataclass(slots=True)
class Relayed:
    """Counts of transactions. Refused transactions stay in their table, and are on the list of refused messages."""

    sent: int = 0
    refused: int = 0


class Mover(Protocol):
    """Moves transactions to one kind of target."""

    async def move(self, outbox: Outbox) -> bool:
        """Read, send and mark transactions; False if there was nothing to move.

        Raises Unavailable if the source or the target is away, or accepts nothing for now.
        """
        ...
