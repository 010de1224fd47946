"""The time index: delayed messages by when they are due, over the entries of the log itself.

Every part of the log has its delayed entries sorted by (due, payload position). They are released in exactly that
order, so one pair says which have been released: everything up to it. Only the next few thousand are held
in memory; a second pair, the horizon, says how far they have been loaded.
"""

from __future__ import annotations

import heapq

from notify.storage.log.entry import EntryKind
from notify.storage.log.parts import Parts

LOAD = 20_000
"""How many delayed messages are loaded at a time; at most four times as many are in memory."""

FIRST_WINDOW_US = 1_000_000
FOR_EVER_US = 1 << 62
Moment = tuple[int, int]
_END: Moment = (FOR_EVER_US, 0)


class TimeIndex:
    """Committed messages that are not due yet."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.released: Moment = (0, 0)
        """Everything up to here is in a queue."""
        self._horizon: Moment = _END
        self._near: list[tuple[int, int, bytes]] = []
        self.unpublished: dict[int, tuple[int, bytes]] = {}
        """(due, entry) of delayed messages on their way to the disk, not in a part yet, by payload position."""
        self.leaving: dict[int, int] = {}
        """When withdrawn messages on their way to the disk are due, by payload position."""
        self._withdrawn: set[Moment] = set()
        """Messages in memory that were withdrawn, and get no place when they are due."""

    def load(self) -> None:
        """Discard what is in memory and start after the released messages, once the parts were read."""
        self._near.clear()
        self._withdrawn.clear()
        self._horizon = self.released
        self._load_more()

    def add(self, due_us: int, position: int, entry: bytes) -> None:
        """Add a committed message that is due later than everything released."""
        self.unpublished[position] = (due_us, entry)
        if (due_us, position) <= self._horizon:
            heapq.heappush(self._near, (due_us, position, entry))
            if len(self._near) > 4 * LOAD:
                self._near.sort()  # a sorted list is a heap
                del self._near[2 * LOAD :]
                self._horizon = self._near[-1][:2]
                self._withdrawn = {moment for moment in self._withdrawn if moment <= self._horizon}

    def withdraw(self, due_us: int, position: int) -> None:
        """Withdraw a message that is not released yet."""
        self.leaving[position] = due_us
        if (due_us, position) <= self._horizon:
            self._withdrawn.add((due_us, position))

    def published(self, kind: int, position: int) -> None:
        """The entry of a delayed or withdrawn message is now on the disk and in a part."""
        if kind == EntryKind.WITHDRAWN:
            self.leaving.pop(position, None)
        else:
            self.unpublished.pop(position, None)

    def next_due_us(self) -> int | None:
        """When the next message is due, or would be if it had not been withdrawn."""
        while not self._near and self._horizon < _END:
            self._load_more()
        return self._near[0][0] if self._near else None

    def pop_due(self, now_us: int, limit: int) -> tuple[list[bytes], int]:
        """Due entries in order, and how many messages were taken, at most `limit`. Those without an entry
        were withdrawn."""
        found: list[bytes] = []
        taken = 0
        while taken < limit:
            due_us = self.next_due_us()
            if due_us is None or due_us > now_us:
                break
            due_us, position, entry = heapq.heappop(self._near)
            self.released = moment = (due_us, position)
            taken += 1
            if moment in self._withdrawn:
                self._withdrawn.remove(moment)
            else:
                found.append(entry)
        return found, taken

    def waiting(self) -> int:
        """Roughly how many are delayed: messages due at the instant of the last released one may count twice."""
        released_us, count = self.released[0], 0
        for part in list(self._parts):
            left = part.delayed_count_until(FOR_EVER_US) - part.delayed_count_until(released_us)
            if left:  # a withdrawn message has one entry as delayed and one as withdrawn
                left -= 2 * (part.withdrawn_count_until(FOR_EVER_US) - part.withdrawn_count_until(released_us))
            count += left
        return max(0, count)

    def _load_more(self) -> None:
        """Load the next few thousand after the horizon from all parts."""
        begin_us, position = self._horizon
        parts = list(self._parts)
        window_us = FIRST_WINDOW_US
        passed = sum(part.delayed_count_until(begin_us) for part in parts)
        total = sum(part.delayed_count_until(FOR_EVER_US) for part in parts)
        until_us = FOR_EVER_US
        while begin_us and total - passed > LOAD and window_us < FOR_EVER_US:
            until_us = begin_us + window_us
            if sum(part.delayed_count_until(until_us) for part in parts) - passed >= LOAD // 2:
                break
            window_us *= 2
        # One more than wanted shows whether a part has more.
        rows = [
            (*row[:2], part, row[2])
            for part in parts
            for row in part.delayed_after(begin_us, position, until_us, LOAD + 1)
        ]
        rows.sort(key=lambda row: row[:2])
        is_cut = len(rows) > LOAD
        end = LOAD
        while 0 < end < len(rows) and rows[end][:2] == rows[end - 1][:2]:
            end += 1  # load a delayed message together with its withdrawal
        del rows[end:]
        if is_cut:
            self._horizon = rows[-1][:2]
        else:
            self._horizon = (until_us, FOR_EVER_US) if until_us < FOR_EVER_US else _END
        near = [(due_us, at, part.delayed_entry(number)) for due_us, at, part, number in rows]
        for at, (due_us, entry) in self.unpublished.items():
            if (begin_us, position) < (due_us, at) <= self._horizon:
                near.append((due_us, at, entry))
        withdrawn = {row[:2] for row in near if row[2][0] == EntryKind.WITHDRAWN}
        withdrawn |= {(due_us, at) for at, due_us in self.leaving.items()}
        if withdrawn:
            near = [row for row in near if row[:2] not in withdrawn]
        self._near += near
        heapq.heapify(self._near)
