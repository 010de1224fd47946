"""Ordered delivery: of each key one message in flight, the keys in parallel.

A message whose key is busy waits behind it, by its offset alone; it is read again when its turn comes. A retry keeps
its key busy until it is settled. Messages without a key are in no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from notify.server.delivery.cursor import Cursor
from storage.store import Store, StoredMessage, Subscription

WAITING_BOUND = 20_000
"""Offsets that wait behind busy keys, at most: beyond it a queue is not read further until some are settled."""


class OrderedCursor(Cursor):
    """Position of a group in a queue, with what waits behind the keys that are in flight."""

    __slots__ = ("_behind", "_key_of", "_turn_come", "_waiting")

    def __init__(self, store: Store, subscription: Subscription, queue: int) -> None:
        super().__init__(store, subscription, queue)
        self._behind: dict[int, deque[int]] = {}
        """A busy key, by its hash, to the offsets that wait for it."""
        self._key_of: dict[int, int] = {}
        """An offset in flight, or to be retried, to its key."""
        self._turn_come: deque[int] = deque()
        """Offsets whose key has become free."""
        self._waiting = 0

    def take(self, limit: int, now_us: int) -> tuple[list[StoredMessage], int]:
        taken = self._take_retries(limit, now_us)
        while self._turn_come and len(taken) < limit:
            taken += self._take_one(self._turn_come.popleft())
        skipped = 0
        while len(taken) < limit and not self.is_paused() and self._waiting < WAITING_BOUND:
            found, filtered = self._take_new(limit - len(taken))
            skipped += filtered
            if not found and not filtered:
                break
            taken += [message for message in found if self._may_go(message)]
        return taken, skipped

    def _may_go(self, message: StoredMessage) -> bool:
        key = message.key_hash
        if not key:
            return True
        behind = self._behind.get(key)
        if behind is not None:
            behind.append(message.offset)
            self._waiting += 1
            return False
        self._behind[key] = deque()
        self._key_of[message.offset] = key
        return True

    def finished(self, offsets: Iterable[int]) -> None:
        """These are settled for good: the next of their keys may go."""
        if not self._key_of:
            return
        for offset in offsets:
            key = self._key_of.pop(offset, 0)
            if not key:
                continue
            behind = self._behind[key]
            if behind:
                following = behind.popleft()
                self._waiting -= 1
                self._key_of[following] = key
                self._turn_come.append(following)
            else:
                del self._behind[key]
