"""The producers of a bench in one process: callers that repeatedly store a half and its outcome.

Run as `python -m notify.cli.bench.producers` with a JSON specification as its argument; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from notify.client.producer.packing import pack
from notify.client.producer.transactions import TransactionClient
from notify.client.threads.loop import new_event_loop
from notify.errors import NotifyError
from notify.protocol.message import Message
from notify.protocol.wire import Item


class Load:
    """The callers of one process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.body = os.urandom(spec["body"])
        self.latencies: list[float] = []
        self.committed = 0
        self.errors = 0
        self.acknowledged: list[str] = []
        self.commits: dict[str, float] | None = {} if spec.get("commits") else None
        """By id: when the caller of each measured transaction committed, in seconds since 1970."""
        self.measuring = False
        self.stop_at = 0.0

    async def caller(self, client: TransactionClient, number: int) -> None:
        """Store a half and its outcome repeatedly; if there is a rate, at fixed times."""
        spec = self.spec
        topics, keys = spec["topics"], spec["keys"]
        interval = spec["all_clients"] / spec["rate"] if spec["rate"] else 0.0
        next_at = time.perf_counter() + interval * (number / max(spec["clients"], 1))
        turn = number
        perf = time.perf_counter
        while True:
            if interval:
                await asyncio.sleep(max(0.0, next_at - perf()))
                next_at += interval
            started = perf()
            if started >= self.stop_at:
                return
            # Together the callers send to all topics in turn.
            turn += spec["clients"]
            key = str(turn % keys) if keys else None
            message = pack(Message(f"bench-{turn % topics}", self.body, key=key))
            try:
                item = await client.half([message])
                if self.commits is not None and self.measuring:
                    self.commits[item.id] = time.time()
                outcome = client.outcome_soon(item.id, item.shard, "COMMIT")
                if spec["queues_outcomes"]:
                    outcome.add_done_callback(partial(self._count, item.id))
                else:
                    await outcome
                    self._count(item.id, outcome)
            except NotifyError:
                self.errors += 1
                continue
            if self.measuring:
                self.latencies.append(perf() - started)

    def _count(self, transaction_id: str, outcome: asyncio.Future[Item]) -> None:
        """Count a transaction whose outcome the server has answered."""
        if outcome.exception() is not None or outcome.result().status != 200:
            self.errors += 1
            return
        self.acknowledged.append(transaction_id)
        if self.measuring:
            self.committed += 1

    async def run(self) -> dict[str, Any]:
        spec = self.spec
        client = TransactionClient(spec["url"], "bench", instance="bench", batching=spec["batching"], half_seconds=30)
        begin = time.perf_counter()
        self.stop_at = begin + spec["warmup"] + spec["seconds"]
        callers = [asyncio.ensure_future(self.caller(client, number)) for number in range(spec["clients"])]
        await asyncio.sleep(spec["warmup"])
        cpu = _cpu()
        self.measuring = True
        started = time.perf_counter()
        await asyncio.sleep(spec["seconds"])
        self.measuring = False
        seconds = time.perf_counter() - started
        cpu = _cpu() - cpu
        await asyncio.gather(*callers)
        await client.close()
        await asyncio.to_thread(Path(spec["ids"]).write_text, "\n".join(self.acknowledged))
        if self.commits is not None:
            await asyncio.to_thread(Path(spec["commits"]).write_text, json.dumps(self.commits))
        return {
            "committed": self.committed,
            "acknowledged": len(self.acknowledged),
            "ids": spec["ids"],
            "seconds": seconds,
            "errors": self.errors,
            "cpu": cpu,
            "latencies": sorted(self.latencies)[:: max(1, len(self.latencies) // 20_000)],
        }


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the producers of the specification in argv[1]."""
    load = Load(json.loads(sys.argv[1]))
    gc.freeze()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(load.run())))


if __name__ == "__main__":
    main()
