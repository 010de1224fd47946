"""Ordered delivery: one message of each key is in flight at a time; keys run in parallel.

A message whose key is busy waits: only its offset is held, and the message is read again when the key is free. A retry
keeps its key busy until it is settled. Messages without a key have no order.

With `on_exhausted="hold"` a message that has used up its attempts keeps its key busy, too, until somebody decides.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from notify.server.delivery.cursor import MOST_EVALUATED, READ_BYTES, Cursor, is_full
from notify.server.metrics import Metrics
from notify.storage.groups import Subscription
from notify.storage.holds import HOLD
from notify.storage.queues import Store
from notify.storage.records import StoredMessage

WAITING_BOUND = 20_000
"""The most offsets that wait behind busy keys: beyond it the queue is read no further until some are settled."""
MOST_HELD = 1_000
"""The most held keys of a queue: beyond it the queue is read no further, since more than single messages fail."""
MOST_BEHIND_HELD = 50_000
"""The most offsets that wait behind held keys: beyond it the queue is read no further until somebody decides."""


class Line(Protocol):
    """Offsets, first in, first out."""

    def __len__(self) -> int: ...

    def append(self, offset: int, /) -> None: ...

    def popleft(self) -> int: ...


class OrderedCursor(Cursor):
    """A group's cursor in a queue, with the offsets that wait behind busy keys."""

    keeps_order = True

    __slots__ = ("_behind", "_behind_held", "_key_of", "_set_aside", "_turn_come", "_waiting", "held")

    def __init__(self, store: Store, subscription: Subscription, queue: int, metrics: Metrics) -> None:
        self._behind: dict[int, Line] = {}
        """The offsets that wait for a busy key, by the key's hash."""
        self._key_of: dict[int, int] = {}
        """The hash of the key of each offset that is in flight or waits for its retry."""
        self._turn_come: deque[int] = deque()
        """Offsets whose key has become free."""
        self._waiting = 0
        self.held: dict[int, int] = {}
        """The offset of the message that holds a key, by the key's hash."""
        self._set_aside: set[int] = set()
        """The hashes of held keys, and of keys that were held and whose messages still wait for their turns."""
        self._behind_held = 0
        """How many offsets wait behind these keys: they have a bound of their own, and do not count in `_waiting`."""
        super().__init__(store, subscription, queue, metrics)
        self._ahead.update(self.progress.held)
        for offset in sorted({*self.progress.retry_at, *self.progress.held}):
            # A message that waited for its retry at the last stop, or was held, keeps its key busy.
            messages = store.read(self.topic, queue, offset, 1, READ_BYTES)
            if messages and messages[0].offset == offset and not self._may_go(messages[0]):
                self._wait_again(offset)
            elif offset in self.progress.held:
                if offset in self._key_of:
                    self.hold(offset)
                else:  # it is no longer retained, and will be settled as such
                    self.come_back(offset, 0)

    def has_more(self) -> bool:
        return not self._has_no_room() and super().has_more()

    def _has_no_room(self) -> bool:
        return self._waiting >= WAITING_BOUND or self.is_held_up()

    def is_held_up(self) -> bool:
        """Whether the queue is read no further: too many keys are held, or too many messages wait behind them."""
        return len(self.held) >= MOST_HELD or self._behind_held >= MOST_BEHIND_HELD

    def may_sleep(self) -> bool:
        return not self._turn_come and super().may_sleep()

    def is_through(self, offset: int) -> bool:
        """Whether each message below `offset` is settled or no longer retained."""
        start = self._store.bounds(self.topic, self.queue)[0]
        return self.progress.next_unsettled(start) >= offset

    def _wait_again(self, offset: int) -> None:
        """Have a retry whose key is busy with an earlier message wait for that message instead of its time."""
        self.retries = [retry for retry in self.retries if retry[1] != offset]
        heapq.heapify(self.retries)

    def take_run(self, limit: int, now_us: int) -> None:
        """None: the key of each message is looked at."""

    def _take_ahead(self, taken: list[StoredMessage], limit: int, now_us: int) -> None:
        skipped, most = 0, MOST_EVALUATED if self._filter is None else self._filter.at_once
        size = sum([len(message.payload) for message in taken])
        while len(taken) < limit and not is_full(size, len(taken)):
            if self._turn_come:
                found = self._take_one(self._turn_come[0], now_us)
                taken += found
                size += sum([len(message.payload) for message in found])
                self._turn_come.popleft()
                continue
            if self.is_paused() or self._has_no_room() or skipped >= most:
                break
            wanted, passed = self._take_new(min(limit - len(taken), most - skipped), most, now_us)
            if not passed:
                break
            skipped += passed - (0 if self.evaluates else len(wanted))
            found = [message for message in wanted if self._may_go(message)]
            taken += found
            size += sum([len(message.payload) for message in found])

    def _may_go(self, message: StoredMessage) -> bool:
        key = message.key_hash
        if not key:
            return True
        behind = self._behind.get(key)
        if behind is not None:
            behind.append(message.offset)
            if key in self._set_aside:
                self._behind_held += 1
            else:
                self._waiting += 1
            return False
        self._behind[key] = deque()
        self._key_of[message.offset] = key
        return True

    def finished(self, offsets: Iterable[int]) -> None:
        """Free the keys of settled offsets: the next message of each key may be delivered."""
        if not self._key_of:
            return
        for offset in offsets:
            key = self._key_of.pop(offset, 0)
            if not key:
                continue
            if self.held:
                self.held.pop(key, None)
            behind = self._behind[key]
            if behind:
                following = behind.popleft()
                if key in self._set_aside:
                    self._behind_held -= 1
                else:
                    self._waiting -= 1
                self._key_of[following] = key
                self._turn_come.append(following)
            else:
                del self._behind[key]
                self._set_aside.discard(key)

    # --- held keys --------------------------------------------------------------------------------------------

    def holds(self, offset: int) -> bool:
        return self.subscription.on_exhausted == HOLD and offset in self._key_of

    def hold(self, offset: int) -> None:
        key = self._key_of[offset]
        self.held[key] = offset
        if key not in self._set_aside:
            self._set_aside.add(key)
            self._waiting -= len(self._behind[key])
            self._behind_held += len(self._behind[key])

    def release(self, offset: int, now_us: int) -> None:
        """End the hold by the message at an offset, which is delivered again: the storage has recorded it."""
        self.held.pop(self._key_of[offset], None)
        self.come_back(offset, now_us)

    def let_go_dropped(self) -> bool:
        """End the holds by messages that were dropped from the queue: nobody can decide about them any more, and later
        messages of their keys would wait for ever. Whether there were any."""
        start = self._store.bounds(self.topic, self.queue)[0]
        dropped = [offset for offset in self.held.values() if offset < start]
        for offset in dropped:
            self.release(offset, 0)  # it is settled as soon as it is looked for
        return bool(dropped)

    def waiting_for(self, offset: int) -> int:
        """How many messages, of those read so far, wait for the key that the message at an offset holds."""
        return len(self._behind[self._key_of[offset]])
