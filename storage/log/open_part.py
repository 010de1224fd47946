"""The index of the open segment: its entries in log order, and each queue's run of them.

Entries are published when their frame is durable. A run holds entry numbers (4 bytes each), so a queue without
messages in this segment costs nothing here.
"""

from __future__ import annotations

from array import array

import numpy as np

from notify.storage.log.entry import (
    ENTRY_SIZE,
    ID_AT,
    KEY_HASH_AT,
    EntryKind,
    due_times,
    is_delayed,
    message_key,
    message_key_of,
    queue_keys,
    table_of,
    transaction_id_of,
)
from notify.storage.log.queues import Queue

MISSING = 0xFFFFFFFF
"""An offset in a run whose entry was lost with a damaged frame."""


_HEAD = 2
"""A run is one array, which saves an object a queue: the first offset in two words, then the entries' numbers."""


def _new_run(first_offset: int) -> array[int]:
    return array("I", (first_offset & 0xFFFFFFFF, first_offset >> 32))


def _first_of(run: array[int]) -> int:
    return run[0] | run[1] << 32


class OpenPart:
    """The entries of one open segment."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.end = base
        self.entries = bytearray()
        self.count = 0
        self.assigned = 0
        self.is_complete = False
        """Whether the last frame of the segment is published: only then may the part be sealed."""
        self.runs: dict[int, array[int] | int] = {}
        """The run of each queue. A queue with one message has one packed integer instead, which saves two objects."""
        self.decided: dict[bytes, int] = {}
        """Ids of the transactions whose outcome is in this segment, from the decision on, and the numbers of
        their producer groups; 0: not recorded."""
        self.rolled_back: set[bytes] = set()
        """The ids among them that were rolled back."""
        self._due_us = array("Q")
        self._due_position = array("Q")
        self._due_number = array("I")
        self._withdrawn_due = array("Q")
        self._by_message: tuple[dict[bytes, int], dict[bytes, int]] | None = None
        """The entries of delayed and withdrawn messages, by message; built on first use."""
        self._id_ends = array("I")
        """The last four bytes of each entry's id, up to the last lookup: a search of the entries themselves, for which
        any client may ask, reads twenty times as much memory."""

    def publish(self, entries: list[bytes], queues: list[Queue | None], delayed: list[tuple[int, int, int]]) -> None:
        """Add the entries of a frame that has become durable, with the queue of each, or None.

        `delayed`: (due, payload position, number within `entries`) of messages that are delayed.
        """
        self.entries += b"".join(entries)
        number = self.count
        for due_us, position, in_frame in delayed:
            self._delay(due_us, position, number + in_frame)
            is_withdrawn = entries[in_frame][0] == EntryKind.WITHDRAWN
            if is_withdrawn:
                self._withdrawn_due.append(due_us)
            if self._by_message is not None:
                self._by_message[is_withdrawn][message_key_of(entries[in_frame])] = number + in_frame
        runs = self.runs
        for queue in queues:
            if queue is not None:
                run = runs.get(queue.key)
                if run is None:
                    runs[queue.key] = queue.visible << 32 | number
                elif type(run) is int:
                    runs[queue.key] = array("I", (*_new_run(run >> 32), run & MISSING, number))
                else:
                    run.append(number)  # type: ignore[union-attr]
                queue.visible += 1
            number += 1
        self.count = number

    def _delay(self, due_us: int, position: int, number: int) -> None:
        self._due_us.append(due_us)
        self._due_position.append(position)
        self._due_number.append(number)

    def index(self) -> None:
        """Build the runs and sets from entries that were read from the log."""
        table = table_of(self.entries)
        self.count = self.assigned = len(table)
        kinds = table["kind"]
        self._index_queues(np.flatnonzero(kinds == EntryKind.QUEUE))
        rolled_back = kinds == EntryKind.ROLLBACK
        decided = rolled_back | (kinds == EntryKind.QUEUE) | is_delayed(kinds) | (kinds == EntryKind.WITHDRAWAL)
        # Some entries of a transaction name no group, such as its dead letters.
        named = decided & (table["producer_group"] != 0)
        self.decided = dict.fromkeys(self._ids(np.flatnonzero(decided)), 0)
        self.decided |= zip(self._ids(np.flatnonzero(named)), table["producer_group"][named].tolist(), strict=True)
        self.rolled_back = set(self._ids(np.flatnonzero(rolled_back)))
        delayed = np.flatnonzero(is_delayed(kinds))
        self._withdrawn_due = array("Q", table["deliver_us"][kinds == EntryKind.WITHDRAWN].tobytes())
        self._by_message = None
        self._due_us = array("Q", due_times(table[delayed]).tobytes())
        self._due_position = array("Q", np.ascontiguousarray(table["position"][delayed]).tobytes())
        self._due_number = array("I", delayed.astype(np.uint32).tobytes())

    def _ids(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[bytes]:
        rows = np.frombuffer(self.entries, np.uint8).reshape(-1, ENTRY_SIZE)
        ids = rows[numbers, ID_AT : ID_AT + 16].tobytes()
        return [ids[at : at + 16] for at in range(0, len(ids), 16)]

    def _index_queues(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        table = table_of(self.entries)[numbers]
        keys = queue_keys(table)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if not len(keys):
            return
        offsets = table["offset"][order].astype(np.int64)
        numbers = numbers[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        ends = np.r_[starts[1:], len(keys)]
        for key, start, end in zip(keys[starts].tolist(), starts.tolist(), ends.tolist(), strict=True):
            first = int(offsets[start])
            # Entries that damage took leave their places empty.
            places = np.full(int(offsets[end - 1]) - first + 1, MISSING, np.uint32)
            places[offsets[start:end] - first] = numbers[start:end]
            self.runs[key] = _new_run(first) + array("I", places.tobytes())

    def _run(self, key: int) -> array[int] | None:
        run = self.runs.get(key)
        return _new_run(run >> 32) + array("I", (run & MISSING,)) if isinstance(run, int) else run

    def first_offset(self, key: int) -> int | None:
        run = self.runs.get(key)
        return run >> 32 if isinstance(run, int) else None if run is None else _first_of(run)

    def bytes_of(self, key: int) -> int:
        """Payload bytes of a queue's entries in this part."""
        run = self._run(key)
        if run is None:
            return 0
        numbers = np.frombuffer(run, np.uint32)[_HEAD:]
        return int(table_of(self.entries)["size"][numbers[numbers != MISSING]].sum())

    def read(self, key: int, offset: int, limit: int) -> bytes:
        """Entries of a queue from `offset` on, joined; empty if this part has none."""
        run = self.runs.get(key)
        if run is None:
            return b""
        if isinstance(run, int):
            number = run & MISSING
            return bytes(self.entries[number * ENTRY_SIZE : (number + 1) * ENTRY_SIZE]) if offset <= run >> 32 else b""
        at = max(0, offset - _first_of(run)) + _HEAD
        numbers = run[at : at + limit]
        if not numbers:
            return b""
        first, last = numbers[0], numbers[-1]
        if last - first == len(numbers) - 1:
            return bytes(self.entries[first * ENTRY_SIZE : (last + 1) * ENTRY_SIZE])
        view = memoryview(self.entries)
        try:
            return b"".join([view[n * ENTRY_SIZE : (n + 1) * ENTRY_SIZE] for n in numbers if n != MISSING])
        finally:
            view.release()

    def lookup(self, transaction_id: bytes) -> list[bytes]:
        """Every published entry of a transaction, in log order."""
        id_ends = self._id_ends
        if len(id_ends) < len(self.entries) // ENTRY_SIZE:
            id_ends.frombytes(table_of(self.entries)["id_low"][len(id_ends) :].astype(np.uint32).tobytes())
        numbers = np.flatnonzero(np.frombuffer(id_ends, np.uint32) == int.from_bytes(transaction_id[-4:])).tolist()
        entries = [bytes(self.entries[n * ENTRY_SIZE : (n + 1) * ENTRY_SIZE]) for n in numbers]
        return [entry for entry in entries if transaction_id_of(entry) == transaction_id]

    def keyed(self, key_hash: int) -> list[bytes]:
        """Every published queue entry of a key, by its hash, in log order."""
        found = []
        wanted = key_hash.to_bytes(8, "little")
        at = self.entries.find(wanted)
        while at >= 0:
            first = at - KEY_HASH_AT
            if at % ENTRY_SIZE == KEY_HASH_AT and self.entries[first] == EntryKind.QUEUE:
                found.append(bytes(self.entries[first : first + ENTRY_SIZE]))
            at = self.entries.find(wanted, at + 1)
        return found

    def delayed_after(self, due_us: int, position: int, until_us: int, limit: int) -> list[tuple[int, int, int]]:
        """(due, payload position, entry number) of delayed messages after a point in due order, up to an instant."""
        if not self._due_us:
            return []
        due = np.frombuffer(self._due_us, np.uint64)
        at = np.frombuffer(self._due_position, np.uint64)
        behind = (due > np.uint64(due_us)) | ((due == np.uint64(due_us)) & (at > np.uint64(position)))
        numbers = np.flatnonzero(behind & (due <= np.uint64(until_us)))
        order = numbers[np.lexsort((at[numbers], due[numbers]))[:limit]].tolist()
        return [(self._due_us[n], self._due_position[n], self._due_number[n]) for n in order]

    def delayed_count_until(self, until_us: int) -> int:
        """How many delayed messages, including released ones, were due up to an instant."""
        due = np.frombuffer(self._due_us, np.uint64) if self._due_us else np.empty(0, np.uint64)
        return int((due <= np.uint64(until_us)).sum())

    def withdrawn_count_until(self, until_us: int) -> int:
        """How many messages due up to an instant were withdrawn here."""
        due = np.frombuffer(self._withdrawn_due, np.uint64) if self._withdrawn_due else np.empty(0, np.uint64)
        return int((due <= np.uint64(until_us)).sum())

    def delayed_of(self, transaction_id: bytes, number: int) -> tuple[bytes, bytes]:
        """The entries of one message as delayed and as withdrawn; each empty if it is not here."""
        if self._by_message is None:
            self._by_message = {}, {}
            for place in self._due_number:
                entry = self.delayed_entry(place)
                self._by_message[entry[0] == EntryKind.WITHDRAWN][message_key_of(entry)] = place
        key = message_key(transaction_id, number)
        delayed, withdrawn = (places.get(key) for places in self._by_message)
        return (
            b"" if delayed is None else self.delayed_entry(delayed),
            b"" if withdrawn is None else self.delayed_entry(withdrawn),
        )

    def delayed_entry(self, number: int) -> bytes:
        """The entry of a delayed message."""
        return bytes(self.entries[number * ENTRY_SIZE : (number + 1) * ENTRY_SIZE])

    def outcome(self, transaction_id: bytes) -> bool | None:
        """True committed, False rolled back, None not decided in this part."""
        if transaction_id not in self.decided:
            return None
        return transaction_id not in self.rolled_back

    def group_number(self, transaction_id: bytes) -> int:
        """The number of the producer group of a transaction that was decided here; 0: unknown."""
        return self.decided.get(transaction_id, 0)
