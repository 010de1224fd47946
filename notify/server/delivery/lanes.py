"""Lanes: the offsets that wait in a queue, by tenant, and whose turn it is. Numbers only: no message, no storage.

Tenants take turns by deficit round robin: each turn adds a few messages to what a tenant may have, and what a request
could not take is left for the next one. A tenant without waiting messages has no lane, and saves nothing up.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COUNT_BITS = 20
LONGEST_RUN = (1 << COUNT_BITS) - 1
"""A run is one number: its first offset, and its count in the lowest bits."""
LONGEST_TURN = 16
"""The most messages of a tenant's turn."""
MOST_TENANTS = 10_000
"""The most tenants with a lane of their own; further ones share a lane with others until it is empty."""
SHARED_LANES = 64
LANE_BYTES = 512
"""About what a lane takes in addition to its offsets."""


class OffsetQueue:
    """Offsets, first in, first out: 8 bytes for each run of neighbours."""

    __slots__ = ("_at", "_count", "_runs")

    def __init__(self) -> None:
        self._runs = array("Q")
        self._at = 0
        """The first run that is not taken."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def first(self) -> int:
        """The next offset."""
        return self._runs[self._at] >> COUNT_BITS

    @property
    def runs(self) -> int:
        return len(self._runs) - self._at

    def append(self, offset: int) -> None:
        self.add(offset, 1)

    def add(self, first: int, count: int) -> None:
        """Add neighbouring offsets."""
        runs = self._runs
        self._count += count
        if len(runs) > self._at:
            last = runs[-1]
            held = last & LONGEST_RUN
            if (last >> COUNT_BITS) + held == first and held + count <= LONGEST_RUN:
                runs[-1] = last + count
                return
        while count > LONGEST_RUN:
            runs.append(first << COUNT_BITS | LONGEST_RUN)
            first, count = first + LONGEST_RUN, count - LONGEST_RUN
        runs.append(first << COUNT_BITS | count)

    def take(self, most: int) -> range:
        """Remove the next offsets: neighbours, at most `most`."""
        runs, at = self._runs, self._at
        first, count = runs[at] >> COUNT_BITS, runs[at] & LONGEST_RUN
        if count > most:
            runs[at] = (first + most) << COUNT_BITS | (count - most)
            count = most
        else:
            self._at = at + 1
            if self._at == len(runs):
                self._runs, self._at = array("Q"), 0
            elif self._at >= 512 and self._at * 2 >= len(runs):
                del runs[: self._at]
                self._at = 0
        self._count -= count
        return range(first, first + count)

    def popleft(self) -> int:
        """Remove the next offset."""
        return self.take(1).start


class Lane:
    """The messages that wait of one tenant, or of several that share the lane."""

    __slots__ = ("again", "credit", "number", "offsets")

    def __init__(self, number: int) -> None:
        self.number = number
        """The tenant's hash; below 0 if several share it."""
        self.offsets = OffsetQueue()
        """In ascending order."""
        self.again: list[int] = []
        """Heap of offsets that were passed before: due retries, and in mode ordered those whose key is free."""
        self.credit = 0
        """How many messages are left of its turn."""

    def __len__(self) -> int:
        return len(self.offsets) + len(self.again)

    @property
    def first(self) -> int:
        """The lowest offset."""
        if not self.offsets:
            return self.again[0]
        return min(self.again[0], self.offsets.first) if self.again else self.offsets.first

    def take(self, most: int) -> list[int]:
        """Remove at most `most` offsets, the lowest first."""
        taken: list[int] = []
        while self.again and len(taken) < most:
            taken.append(self.take_lowest())
        while self.offsets and len(taken) < most:
            taken += self.offsets.take(most - len(taken))
        return taken

    def take_lowest(self) -> int:
        """Remove the lowest offset."""
        if self.again and (not self.offsets or self.again[0] < self.offsets.first):
            return heapq.heappop(self.again)
        return self.offsets.popleft()


class Waits(NamedTuple):
    """The messages of one tenant that wait in a queue."""

    messages: int
    first: int
    """The offset of the oldest one."""


class Lanes:
    """The lanes of one queue."""

    __slots__ = ("_by_number", "_turns", "count", "runs")

    def __init__(self) -> None:
        self._by_number: dict[int, Lane] = {}
        self._turns: deque[Lane] = deque()
        """All lanes, the one whose turn it is first. A lane that has become empty leaves when its turn comes."""
        self.count = 0
        """How many offsets wait."""
        self.runs = 0
        """How many runs these are in the lanes' queues."""

    @property
    def bytes(self) -> int:
        """About the memory of all lanes."""
        return self.runs * 8 + len(self._turns) * LANE_BYTES

    def number_of(self, tenant: int) -> int:
        """The number of the lane of a tenant: its hash, or below 0 if it shares one.

        A tenant that has come to share a lane stays there until that is empty: its messages keep their order.
        """
        if tenant in self._by_number:
            return tenant
        shared = -1 - tenant % SHARED_LANES
        if shared in self._by_number or len(self._by_number) >= MOST_TENANTS:
            return shared
        return tenant

    def _lane(self, tenant: int) -> Lane:
        number = self.number_of(tenant)
        lane = self._by_number.get(number)
        if lane is None:
            lane = self._by_number[number] = Lane(number)
            self._turns.append(lane)
        return lane

    def add(self, tenant: int, first: int, count: int) -> None:
        """Have neighbouring offsets of a tenant wait behind its others."""
        offsets = self._lane(tenant).offsets
        before = offsets.runs
        offsets.add(first, count)
        self.runs += offsets.runs - before
        self.count += count

    def add_each(self, offsets: NDArray[np.uint64], tenants: NDArray[np.uint64]) -> None:
        """Have ascending offsets wait, each behind the others of its tenant."""
        if not len(offsets):
            return
        order = np.argsort(tenants, kind="stable")
        offsets, tenants = offsets[order], tenants[order]
        is_next = (tenants[1:] == tenants[:-1]) & (offsets[1:] == offsets[:-1] + np.uint64(1))
        starts = np.flatnonzero(np.r_[True, ~is_next])
        counts: NDArray[Any] = np.diff(np.r_[starts, len(offsets)])
        runs = zip(offsets[starts].tolist(), tenants[starts].tolist(), counts.tolist(), strict=True)
        for first, tenant, count in sorted(runs):  # new lanes get their first turns in the order of the queue
            self.add(tenant, first, count)

    def add_again(self, tenant: int, offset: int) -> None:
        """Have an offset wait that was passed before."""
        heapq.heappush(self._lane(tenant).again, offset)
        self.count += 1

    def take(self, limit: int) -> list[tuple[int, int]]:
        """Remove at most `limit` offsets, by turns: (offset, number of its lane) of each."""
        taken: list[tuple[int, int]] = []
        turns = self._turns
        turn = max(1, min(LONGEST_TURN, limit // max(1, len(turns))))
        while len(taken) < limit and turns:
            lane = turns[0]
            if lane.credit <= 0:
                lane.credit = turn
            offsets = self._removed(lane, min(lane.credit, limit - len(taken)))
            taken += [(offset, lane.number) for offset in offsets]
            lane.credit -= len(offsets)
            if not lane:
                turns.popleft()
                del self._by_number[lane.number]
            elif lane.credit <= 0:
                turns.rotate(-1)
        return taken

    def _removed(self, lane: Lane, most: int) -> list[int]:
        before = lane.offsets.runs
        offsets = lane.take(most)
        self.runs += lane.offsets.runs - before
        self.count -= len(offsets)
        return offsets

    def take_lowest(self, limit: int) -> list[tuple[int, int]]:
        """Remove the lowest `limit` offsets of all tenants, as `take` returns them."""
        taken: list[tuple[int, int]] = []
        heap = [(lane.first, lane.number) for lane in self._turns if lane]
        heapq.heapify(heap)
        while heap and len(taken) < limit:
            number = heap[0][1]
            lane = self._by_number[number]
            taken += [(offset, number) for offset in self._removed(lane, 1)]
            if lane:
                heapq.heapreplace(heap, (lane.first, number))
            else:
                heapq.heappop(heap)
        return taken

    def take_again(self, limit: int) -> list[tuple[int, int]]:
        """Remove at most `limit` of the offsets that were passed before, as `take` returns them."""
        taken: list[tuple[int, int]] = []
        for lane in self._turns:
            while lane.again and len(taken) < limit:
                taken.append((heapq.heappop(lane.again), lane.number))
        self.count -= len(taken)
        return taken

    def has_again(self) -> bool:
        """Whether any offset waits that was passed before."""
        return any(lane.again for lane in self._turns)

    def waiting(self) -> dict[int, Waits]:
        """The messages that wait in each lane, by its number."""
        return {lane.number: Waits(len(lane), lane.first) for lane in self._turns if lane}
