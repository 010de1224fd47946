"""Batches of committed transactions, as the assembly of each log fills them, and the transaction that is being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from notify.binlog_bridge.errors import Unreadable
from notify.binlog_bridge.log import Read
from notify.errors import NotifyError
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch


class OpenTransaction:
    """Notify's transactions within one transaction of the source, until that is committed or rolled back."""

    __slots__ = ("_messages", "_savepoints", "bytes", "newest_us", "pending", "prepared", "rolled_back")

    def __init__(self) -> None:
        self.pending: list[BridgedTransaction] = []
        """Transactions that are sent with the commit; the next event may add messages to the last one."""
        self.prepared: list[str] = []
        """Ids of transactions that were already sent as a part."""
        self.rolled_back: list[str] = []
        """Ids of transactions that were sent as a part, and then rolled back to a savepoint."""
        self.bytes = 0
        """The size, in bytes, of rows and savepoints read since the last part; 0 if there were none."""
        self.newest_us = 0
        """When the newest row was written."""
        self._messages: list[int] = []
        """The number of messages of each transaction in `prepared`."""
        self._savepoints: dict[bytes, tuple[int, int]] = {}
        """By name, the oldest first: the number of transactions then, and the number of messages of the last one."""

    @property
    def is_empty(self) -> bool:
        return not self.pending and not self.prepared and not self.rolled_back

    def clear(self) -> None:
        """Begin another transaction of the source."""
        self.pending = []
        self.bytes = self.newest_us = 0
        if self.prepared or self.rolled_back or self._savepoints:
            self.prepared, self.rolled_back, self._messages, self._savepoints = [], [], [], {}

    def split(self) -> list[BridgedTransaction]:
        """Remove all transactions except the last; they are sent as a part now. Raises Unreadable like `whole`."""
        self._check_not_sent(self.pending)
        part, self.pending = self.pending[:-1], self.pending[-1:]
        self.prepared += [t.id for t in part]
        self._messages += [len(t.messages) for t in part]
        self._check_not_sent(self.pending)
        return _joined(part)

    def whole(self) -> list[BridgedTransaction]:
        """The pending transactions, each once with all its messages: those of several may be written in turns.

        Raises Unreadable if messages of one of them were sent as a part.
        """
        self._check_not_sent(self.pending)
        return _joined(self.pending)

    def _check_not_sent(self, transactions: list[BridgedTransaction]) -> None:
        if self.prepared:
            for name in {t.id for t in transactions}.intersection(self.prepared):
                raise Unreadable(
                    f"the messages of transaction {name} were written apart from each other in a large transaction of "
                    "the source: decide it at the queue by hand, then start this bridge with --backfill"
                )

    def savepoint(self, name: bytes) -> None:
        self._savepoints.pop(name, None)
        last = len(self.pending[-1].messages) if self.pending else self._messages[-1] if self._messages else 0
        self._savepoints[name] = len(self.prepared) + len(self.pending), last
        self.bytes += len(name) + 1

    def roll_back_to(self, name: bytes) -> None:
        """Discard the messages since a savepoint. A savepoint that was never logged was set before the first write.

        Raises Unreadable if a transaction was sent as a part, and only some of its messages are rolled back.
        """
        count, messages = self._savepoints.get(name, (0, 0))
        names = list(self._savepoints)
        for later in names[names.index(name) + 1 :] if name in self._savepoints else names:
            del self._savepoints[later]
        if count <= len(self.prepared):
            kept = self.prepared[:count]
            halved = set(kept).intersection(self.prepared[count:])
            if count and self._messages[count - 1] != messages:
                halved.add(kept[-1])
            if halved:
                raise Unreadable(
                    f"transaction {min(halved)} was rolled back in part, to a savepoint within it, after "
                    "its messages had gone to the queue as a part of a large transaction: decide it there by hand, "
                    "then start this bridge with --backfill"
                )
            self.rolled_back += self.prepared[count:]
            del self.prepared[count:], self._messages[count:]
            self.pending = []
        else:
            del self.pending[count - len(self.prepared) :]
            del self.pending[-1].messages[messages:]

    def roll_back(self) -> None:
        """Discard the whole transaction."""
        self.roll_back_to(b"")


def _joined(transactions: list[BridgedTransaction]) -> list[BridgedTransaction]:
    """The transactions, each with the messages of all that have its id."""
    if len(transactions) < 2:
        return transactions
    by_id: dict[str, BridgedTransaction] = {}
    for transaction in transactions:
        first = by_id.setdefault(transaction.id, transaction)
        if first is not transaction:
            first.messages += transaction.messages
    return list(by_id.values())


BATCH_TRANSACTIONS = 2000
BATCH_BYTES = 2 << 20
PART_BYTES = 4 << 20
"""A larger transaction is sent in parts, one request each, which become visible with the last part."""


class Batching:
    """The base of an assembly: the batch that is being filled, and the transaction of the source that is being read."""

    def __init__(self) -> None:
        self.caught_up_us = 0
        """When the source last had no more events; 0 after the next transaction began."""
        self.most_bytes: Callable[[], int] = lambda: BATCH_BYTES
        """Tells the size of rows, in bytes, from which on a batch is full: at most BATCH_BYTES."""
        self._batch = _batch([])
        self._size = 0
        """The size of the batch's rows, in bytes."""
        self._passed = 0
        """How many transactions of the source the batch covers, including those without messages."""
        self._rows_us = 0
        """When the newest row of the batch was written."""
        self._open = OpenTransaction()

    def batches(self, received: Iterable[Any]) -> Iterator[Read]:
        """Batches of committed transactions; a batch without messages has the position only. Raises what `_read` does,
        and before that completes the batch. Otherwise, if the error comes again each time, nothing before it would ever
        be moved.

        `received`: what the source sends, and None after the last of what has arrived so far.
        """
        try:
            yield from self._read(received)
        except NotifyError:
            if self._passed:
                yield self._finished()
            raise

    def _read(self, received: Iterable[Any]) -> Iterator[Read]:
        raise NotImplementedError

    def _position(self) -> str:
        """The position after the newest transaction that has ended."""
        raise NotImplementedError

    def _finished(self) -> Read:
        """The batch with the position after it; a new batch begins."""
        batch, rows_us = self._batch, self._rows_us
        batch.position = self._position()
        self._batch, self._size, self._passed, self._rows_us = _batch([]), 0, 0, 0
        return batch, rows_us

    @property
    def _is_full(self) -> bool:
        return self._size > self.most_bytes() or self._passed >= BATCH_TRANSACTIONS

    @property
    def _would_overflow(self) -> bool:
        """Whether the batch and the open transaction would be too much for one request."""
        return bool(self._size) and self._size + self._open.bytes > min(PART_BYTES, 2 * self.most_bytes())

    def _part_after(self, size: int) -> list[Read]:
        """Batches to send now if the open transaction has grown too large. `size`: the bytes of its last rows."""
        transaction = self._open
        transaction.bytes += size
        if transaction.bytes <= PART_BYTES or len(transaction.pending) <= 1:
            return []
        part = transaction.split()
        batches = [self._finished()] if self._batch.transactions or self._batch.rollback else []
        transaction.bytes = size
        return [*batches, (_batch(part, prepare=True), 0)]

    def _take_open(self) -> None:
        """Add the messages of the open transaction, which is committed, to the batch."""
        transaction = self._open
        batch = self._batch
        batch.transactions += transaction.whole()
        batch.commit += dict.fromkeys(transaction.prepared)
        batch.rollback += dict.fromkeys(transaction.rolled_back)
        self._rows_us = transaction.newest_us or self._rows_us
        self._size += transaction.bytes
        transaction.clear()


def _batch(transactions: list[BridgedTransaction], *, prepare: bool = False) -> PackedBridgeBatch:
    return PackedBridgeBatch(epoch=0, expected_position="", position="", transactions=transactions, prepare=prepare)
