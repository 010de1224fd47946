"""The held keys of one group: which there are, and what people decide about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from notify.protocol import ids
from notify.protocol.wire import decode_payload
from notify.server.delivery.cursor import READ_BYTES, Cursor
from notify.server.delivery.ordered import OrderedCursor
from notify.server.delivery.settling import Settling
from notify.storage.holds import HOLD_RELEASED, HOLD_RETRIED, Hold
from notify.storage.queues import Store


class HeldKey(NamedTuple):
    """A message that has used up its attempts, and holds its key."""

    cursor: OrderedCursor
    offset: int
    hold: Hold


class HeldMessage(NamedTuple):
    """The id and key of a held message, for people."""

    id: str
    """Empty if it is no longer retained."""
    key: str


class Holds:
    """The held keys of a group. What they hold is in the storage; a decision is durable after its `sync`."""

    __slots__ = ("_cursors", "_settling", "_store")

    def __init__(self, store: Store, cursors: Mapping[tuple[str, int], Cursor], settling: Settling) -> None:
        """`cursors`: the group's, by (topic, queue)."""
        self._store = store
        self._cursors = cursors
        self._settling = settling

    def __iter__(self) -> Iterator[HeldKey]:
        for cursor in self._cursors.values():
            if isinstance(cursor, OrderedCursor) and cursor.held:
                for offset in cursor.held.values():
                    yield HeldKey(cursor, offset, cursor.progress.held[offset])

    def held_up(self) -> Iterator[OrderedCursor]:
        """The queues that are read no further because of their held keys."""
        for cursor in self._cursors.values():
            if isinstance(cursor, OrderedCursor) and cursor.held and cursor.is_held_up():
                yield cursor

    def message(self, held: HeldKey) -> HeldMessage:
        """The message that holds a key. It is read: ask for some only."""
        stored = self._store.read(held.cursor.topic, held.cursor.queue, held.offset, 1, READ_BYTES)
        if not stored or stored[0].offset != held.offset:
            return HeldMessage("", "")
        message_id = ids.message_id(stored[0].transaction_id, stored[0].message_no)
        key = "" if stored[0].corrupt else decode_payload(stored[0].payload).key or ""
        return HeldMessage(message_id, key)

    def retry(self, held: HeldKey, now_us: int) -> None:
        """Deliver the message one more time; if that fails, its key is held again."""
        self._settling.release(held.cursor, held.offset, HOLD_RETRIED, now_us)

    def release(self, held: HeldKey, now_us: int) -> None:
        """Deliver the message again, with all its attempts."""
        self._settling.release(held.cursor, held.offset, HOLD_RELEASED, now_us)

    def skip(self, held: HeldKey, reason: str, now_us: int) -> None:
        """Make the message a dead letter, so that the key's next one may be delivered."""
        self._settling.skip(held.cursor, held.offset, reason, now_us)
