"""The publishing process of a bench over Kafka: a bridge, or a plain producer that sends the same records.

Run as `python -m tools.bench.kafka.published` with a JSON specification; prints one JSON object. Both are measured
from their first committed transaction on: before that they connect.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from typing import Any

from notify.kafka.cluster import Cluster
from notify.kafka.records import GROUP, ID, Headers
from notify.protocol import ids

CALL_SECONDS = 60.0
POLL_SECONDS = 0.002


class Stretch:
    """Rows, time and CPU time between two moments."""

    def __init__(self, rows: int) -> None:
        self._rows, self._at, self._cpu = rows, time.perf_counter(), time.process_time()

    def figures(self, rows: int) -> dict[str, float]:
        """Rows a second since then, and microseconds of this process's CPU time for each."""
        more = rows - self._rows
        seconds, cpu = time.perf_counter() - self._at, time.process_time() - self._cpu
        return {"per_second": more / seconds, "cpu_us": cpu / more * 1e6}


async def bridge(spec: dict[str, Any]) -> dict[str, Any]:
    """A bridge, from an existing binlog."""
    from notify.binlog_bridge.bridge import Bridge

    moving = Bridge([spec["dsn"]], f"kafka://{spec['brokers']}", name=spec["source"])
    totals = moving.totals
    task = asyncio.ensure_future(moving.run())
    stretch: Stretch | None = None
    batches = 0
    while totals.rows < spec["rows"] and not task.done():
        if stretch is None and totals.rows:
            stretch, batches = Stretch(totals.rows), totals.batches
        await asyncio.sleep(POLL_SECONDS)  # the resolution of the figures
    if task.done():
        task.result()
    assert stretch is not None
    figures = stretch.figures(totals.rows) | {"batches": totals.batches - batches}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return figures


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """A transactional producer as the client's manual has it: a batch, a commit."""
    records: list[tuple[bytes, Headers]] = [
        (os.urandom(spec["body"]), [(ID, f"{ids.to_text(ids.new_id())}.0".encode()), (GROUP, b"bench")])
        for _ in range(spec["rows"])
    ]
    own = {"transactional.id": spec["source"], "linger.ms": 5, "compression.type": "lz4", "batch.size": 1 << 20}
    producer = Cluster.of(f"kafka://{spec['brokers']}").producer(own | {"queue.buffering.max.messages": 1_000_000})
    producer.init_transactions(CALL_SECONDS)
    gc.freeze()
    stretch: Stretch | None = None
    for first in range(0, len(records), spec["batch"]):
        producer.begin_transaction()
        for value, headers in records[first : first + spec["batch"]]:
            producer.produce(spec["topic"], value, headers=headers)
        producer.commit_transaction(CALL_SECONDS)
        stretch = stretch or Stretch(spec["batch"])
    assert stretch is not None
    return stretch.figures(len(records)) | {"batches": len(records) // spec["batch"] - 1}


def main() -> None:
    """Publish by the specification in argv[1]."""
    spec = json.loads(sys.argv[1])
    print(json.dumps(plain(spec) if spec["kind"] == "plain" else asyncio.run(bridge(spec))))


if __name__ == "__main__":
    main()
