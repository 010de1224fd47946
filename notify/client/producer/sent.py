"""The object that `send` returns: it has the id of a message, before and after the commit."""

from __future__ import annotations

from typing import Protocol

from notify.errors import InvalidRequest
from notify.protocol.wire import PackedMessage


class Named(Protocol):
    """The messages of a transaction (`PendingMessages`)."""

    shard: str | None
    prepared: bool
    """Whether its rows are written, so that only its database knows whether it commits."""
    failed: BaseException | None
    """The error for which its commit was refused."""
    dropped: list[PackedMessage]
    """The messages that a rollback of the whole transaction discarded."""

    @property
    def messages(self) -> list[PackedMessage]:
        """The encoded messages, in the order in which they were sent."""
        ...

    def name(self) -> str:
        """The id under which the transaction commits, if it does."""
        ...


class Sent:
    """A message that was sent with a transaction."""

    __slots__ = ("_id", "_number", "_packed", "_pending")

    def __init__(self, pending: Named | None, number: int, packed: PackedMessage | None, message_id: str = "") -> None:
        self._pending = pending
        self._number = number
        self._packed = packed
        self._id = message_id

    @property
    def id(self) -> str:
        """The id that the message has if the transaction commits, for example to be stored with what it is about.

        A transaction whose id was read before its commit keeps it; in the rare case that it could commit under another
        id only, its commit raises TransactionRefused, and may be retried. Raises InvalidRequest if the message's
        savepoint was rolled back: a later message of the transaction has the id then.
        """
        if self._pending is None:
            return self._id
        if self._is_undone:
            raise InvalidRequest(
                "this message was dropped as its savepoint was rolled back: it has no id", "invalid_id"
            )
        return f"{self._pending.name()}.{self._number}"

    @property
    def _is_undone(self) -> bool:
        """Whether the message's savepoint was rolled back, so that it is none of its transaction's."""
        if self._pending is None:
            return False
        at_number = self._pending.messages[self._number : self._number + 1]
        return not any(packed is self._packed for packed in (*at_number, *self._pending.dropped))

    @property
    def topic(self) -> str:
        """The topic of the message."""
        return "" if self._packed is None else self._packed.topic

    @property
    def key(self) -> str | None:
        """The key of the message; None also before the commit, if the key is a callable."""
        return None if self._packed is None else self._packed.key

    @property
    def place_key(self) -> str | None:
        """The key by which a server with several workers chose the one that has the message: the first one of the
        transaction's messages. None also before the commit, if that key is a callable."""
        keys = () if self._pending is None else (m.key for m in self._pending.messages)
        return next((key for key in keys if key is not None), self.key)

    @property
    def shard(self) -> str | None:
        """The shard that has the half; None if that is not known."""
        return None if self._pending is None else self._pending.shard
