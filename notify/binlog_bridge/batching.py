"""Batches of committed transactions, as the assembly of each log fills them."""

from __future__ import annotations

from notify.binlog_bridge.log import Read
from notify.binlog_bridge.open_transaction import OpenTransaction
from notify.protocol.wire import BridgedTransaction, PackedBridgeBatch

BATCH_TRANSACTIONS = 2000
BATCH_BYTES = 2 << 20
PART_BYTES = 4 << 20
"""A larger transaction is sent in parts, one request each, which become visible with the last part."""


class Batching:
    """The base of an assembly: the batch that is being filled, and the transaction of the source that is being read."""

    def __init__(self) -> None:
        self.caught_up_us = 0
        """When the source last had no more events; 0 after the next transaction began."""
        self._batch = _batch([])
        self._size = 0
        """The size of the batch's rows, in bytes."""
        self._passed = 0
        """How many transactions of the source the batch covers, including those without messages."""
        self._rows_us = 0
        """When the newest row of the batch was written."""
        self._open = OpenTransaction()

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
        return self._size > BATCH_BYTES or self._passed >= BATCH_TRANSACTIONS

    @property
    def _would_overflow(self) -> bool:
        """Whether the batch and the open transaction would be too much for one request."""
        return bool(self._size) and self._size + self._open.bytes > PART_BYTES

    def _part_after(self, size: int) -> list[Read]:
        """Batches to send now if the open transaction has grown too large. `size`: the bytes of its last rows."""
        transaction = self._open
        transaction.bytes += size
        if transaction.bytes <= PART_BYTES or len(transaction.pending) <= 1:
            return []
        batches = [self._finished()] if self._batch.transactions or self._batch.rollback else []
        part = transaction.split()
        transaction.bytes = size
        return [*batches, (_batch(part, prepare=True), 0)]

    def _take_open(self) -> None:
        """Add the messages of the open transaction, which is committed, to the batch."""
        transaction = self._open
        batch = self._batch
        batch.transactions += transaction.pending
        batch.commit += transaction.prepared
        batch.rollback += transaction.rolled_back
        self._rows_us = transaction.newest_us or self._rows_us
        self._size += transaction.bytes
        transaction.clear()


def _batch(transactions: list[BridgedTransaction], *, prepare: bool = False) -> PackedBridgeBatch:
    return PackedBridgeBatch(epoch=0, expected_position="", position="", transactions=transactions, prepare=prepare)
