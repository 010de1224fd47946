"""Finds the transactions that both the log after a position and a snapshot of the tables have."""

from __future__ import annotations

from notify.binlog_bridge.kinds import position_of
from notify.binlog_bridge.log import Position
from notify.binlog_bridge.read_ahead import ReadAhead
from notify.errors import InvalidRequest

MOST = 1_000_000
"""The most ids that are held in memory, 150 bytes each."""


async def overlap(reading: ReadAhead, until: Position) -> set[str]:
    """The ids of the transactions up to a position. Closes the reading.

    Raises the errors of the reading, and InvalidRequest for more than MOST ids.
    """
    transaction_ids: set[str] = set()
    try:
        while True:
            read = await reading.next()
            if read is None:
                if reading.caught_up_us:
                    return transaction_ids
                continue
            batch, _ = read
            transaction_ids.update(t.id for t in batch.transactions)
            if len(transaction_ids) > MOST:
                raise InvalidRequest(
                    f"more than {MOST:,} transactions committed since the backfill was cut off: it cannot continue; "
                    "start with --backfill-from another instant; everything written from then on is published, even if "
                    "the target has it already"
                )
            reached = position_of(batch.position)
            if reached is not None and reached.reaches(until):
                return transaction_ids
    finally:
        await reading.close()
