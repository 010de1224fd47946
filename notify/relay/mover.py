"""The protocol of a way to move a page of an outbox to a target, and the counts of a relay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from notify.outbox import Outbox


@dataclass(slots=True)
class Relayed:
    """Counts of a relay. `refused` ones stay in their table, on the list of refused messages."""

    sent: int = 0
    refused: int = 0


class Mover(Protocol):
    """One way to move."""

    async def move(self, outbox: Outbox) -> bool:
        """Read, send and mark; False if there was nothing.

        Raises Unavailable where source or target are away, or take nothing for now.
        """
        ...
