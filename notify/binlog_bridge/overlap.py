"""Transactions that a snapshot of the tables and the binlog behind a position both have: the target gets them once."""

from __future__ import annotations

from notify.binlog_bridge.position import Position, reaches
from notify.binlog_bridge.read_ahead import ReadAhead
from notify.errors import InvalidRequest

MOST = 1_000_000
"""So many ids are held in memory, 150 bytes each."""


async def overlap(reading: ReadAhead, until: Position) -> set[str]:
    """Ids of the transactions that are read up to a position. Closes the reading.

    Raises what ends the reading, and InvalidRequest for too many.
    """
    names: set[str] = set()
    try:
        while True:
            read = await reading.next()
            if read is None:
                if reading.caught_up_us:
                    return names
                continue
            batch, _ = read
            names.update(t.id for t in batch.transactions)
            if len(names) > MOST:
                raise InvalidRequest(
                    f"more than {MOST:,} transactions committed since the backfill was cut off: it cannot go on. Start "
                    "with --backfill-from another instant; what was written from then on is published, also what the "
                    "target has already"
                )
            behind = Position.of(batch.position)
            if behind is not None and reaches(behind.gtids, until.gtids):
                return names
    finally:
        await reading.close()
