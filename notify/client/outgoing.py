"""Outgoing: the protocol by which a binding sends a half, and later its outcome, to the server."""

from __future__ import annotations

from typing import Protocol

from notify.protocol.wire import Item, PackedMessage

CLOSED = "this producer is closed: make another one"


class Outgoing(Protocol):
    """Sends for a binding, from the thread or the greenlet in which SQLAlchemy commits."""

    def store_half(self, transaction_id: str, messages: list[PackedMessage], source: str) -> Item:
        """Send a half, wait until it is stored, and return its item. Raises NotifyError.

        `source`: the id of the schema that holds the local transaction.
        """

    def outcome_soon(self, transaction_id: str, shard: str | None, outcome: str) -> None:
        """Queue an outcome. Never raises, and never blocks but with the producer's `wait_for_outcome`."""
