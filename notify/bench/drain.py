"""The wire's client of the benches: consumer groups in one process that receive, count and acknowledge whole batches.

It decodes a batch at once and calls no handler: what a handler gets is measured by notify/bench/handled.py.

Run as `python -m notify.bench.drain` with a JSON specification. It prints a line when the groups begin, and one JSON
object at the end. It stops when each group that is not slow has `expected` messages, or when the file `stop` exists and
no message is left.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec

from notify.client.http import HttpClient
from notify.client.loop import new_event_loop
from notify.wire import RUN_HEAD, Receive, Received, Settle, SettleItem, encode_msgpack

_decode = msgspec.msgpack.Decoder(Received).decode
MAX = 2048
SETTLING = 4


class Drain:
    """One consumer group."""

    def __init__(self, spec: dict[str, Any], group: str) -> None:
        self.spec = spec
        self.group = group
        self.is_slow = group in spec.get("slow", ())
        self.http = HttpClient(spec["url"])
        self.path = f"/v1/groups/{group}/receive?runs=yes"
        self.seen: dict[tuple[str, int], bytearray] = {}
        self.received = self.unique = 0
        self.first_at = self.last_at = 0.0
        self.latencies = array("d")
        self.marks: list[tuple[float, int]] = []
        """Instants, and the number of messages received until then."""

    async def receive(self, wait: float) -> bytes:
        request = Receive(instance=f"{self.group}-bench", max=self.spec.get("max", MAX), wait=wait, lease=60)
        return await self.http.call("POST", self.path, encode_msgpack(request), 90)

    def count(self, received: Received) -> None:
        now = time.time()
        for run in received.runs:
            seen = self.seen.setdefault((run.messages[0].topic, run.queue), bytearray())
            for first, count in run.offsets:
                end = first + count
                if end > len(seen):
                    seen.extend(bytes(max(end - len(seen), len(seen))))
                self.unique += seen.count(0, first, end)
                seen[first:end] = b"\1" * count
            self.received += len(run.messages)
        _, _, committed_us = RUN_HEAD.unpack_from(received.runs[0].heads)
        self.latencies.append(now - committed_us / 1e6)

    async def run(self) -> None:
        expected = self.spec.get("expected") or 0
        stop = Path(self.spec["stop"]) if self.spec.get("stop") else None
        settling: set[asyncio.Task[bytes]] = set()
        until = time.perf_counter() + self.spec.get("seconds", 3600)
        asked = asyncio.ensure_future(self.receive(0.3))
        while time.perf_counter() < until and not (expected and self.unique >= expected):
            answer = await asked
            if not self.is_slow:
                # The next ones, while these are decoded: as consumers do that fetch ahead.
                asked = asyncio.ensure_future(self.receive(0.3))
                await asyncio.sleep(0)
            received = _decode(answer)
            if not received.runs:
                if self.is_slow:
                    asked = asyncio.ensure_future(self.receive(0.3))
                if stop is not None and await asyncio.to_thread(stop.exists):
                    break
                continue
            now = time.perf_counter()
            self.first_at = self.first_at or now
            self.last_at = now
            self.count(received)
            self.marks.append((now, self.received))
            if self.is_slow:
                break  # a slow group holds its messages and requests no more
            receipts = [f"{run.lease}.0-{len(run.messages) - 1}" for run in received.runs]
            body = encode_msgpack(Settle([SettleItem(receipt=receipt, action="ack") for receipt in receipts]))
            settle = asyncio.ensure_future(self.http.call("POST", f"/v1/groups/{self.group}/settle", body, 60))
            settling.add(settle)
            settle.add_done_callback(settling.discard)
            if len(settling) >= SETTLING:
                await asyncio.wait(settling, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()  # what it would get goes to others
        await asyncio.gather(*settling)
        self.last_at = time.perf_counter() if settling else self.last_at
        self.http.close()

    def result(self) -> dict[str, Any]:
        latencies = sorted(self.latencies)
        return {
            "group": self.group,
            "received": self.received,
            "unique": self.unique,
            "seconds": max(self.last_at - self.first_at, 1e-9),
            "latencies": latencies[:: max(1, len(latencies) // 2000)],
            "marks": self.marks[:: max(1, len(self.marks) // 1000)],
        }


async def drain_all(spec: dict[str, Any]) -> dict[str, Any]:
    """Run all groups of this process."""
    drains = [Drain(spec, group) for group in spec["groups"]]
    print("ready", flush=True)
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(drain.run() for drain in drains))
    groups = [drain.result() for drain in drains]
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    counted = sum(drain.received for drain in drains)
    return {"groups": groups, "counted": counted, "seconds": seconds, "cpu_seconds": cpu}


def main() -> None:
    """Run the groups of the specification in argv[1]."""
    gc.freeze()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(drain_all(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
