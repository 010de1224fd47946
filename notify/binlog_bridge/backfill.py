"""Taking from the tables what the binlog no longer has: by state, deduplicated by id, then on from now.

The position is read first: what commits after it is in the binlog behind it, what committed before it is in the
tables. What is in both is sent twice, and stored once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sqlalchemy.engine import Engine

from notify.binlog_bridge import source
from notify.outbox import present
from notify.wire import Bridged, PackedBridgeBatch

log = logging.getLogger("notify.bridge")

TRANSACTIONS = 500


async def backfill(
    engine: Engine, post: Callable[[PackedBridgeBatch], Awaitable[Bridged]], epoch: int, position: str
) -> int:
    """Send every committed transaction of the tables, then set the position to where the source was; how many."""
    behind = await asyncio.to_thread(_position, engine)
    sent = 0
    for outbox in await asyncio.to_thread(present, engine):
        after = ""
        while True:
            found = await asyncio.to_thread(outbox.after, engine, after, TRANSACTIONS)
            if not found:
                break
            await post(
                PackedBridgeBatch(epoch=epoch, expected_position=position, position=position, transactions=found)
            )
            sent += len(found)
            after = found[-1].id
    await post(PackedBridgeBatch(epoch=epoch, expected_position=position, position=behind))
    log.warning("backfilled %d transactions; going on from %s", sent, behind)
    return sent


def _position(engine: Engine) -> str:
    with engine.connect() as connection:
        return source.current_position(connection).text
