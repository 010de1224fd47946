"""The wire's client of the benches beside producers: one group receives, acknowledges and counts all topics' messages.

It calls no handler. Run as `python -m notify.bench.consume` with a JSON specification. It prints a line once it has
subscribed, and one JSON object at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from array import array
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from notify.client.http import HttpClient
from notify.client.loop import new_event_loop
from notify.wire import Receive, Received, Settle, SettleItem, encode_msgpack

GROUP = "bench"
MAX = 2000
_decode = msgspec.msgpack.Decoder(Received).decode


def ranges(receipts: list[str]) -> list[SettleItem]:
    """Items that acknowledge these receipts; consecutive receipts of one lease become one range."""
    items: list[SettleItem] = []
    lease, first, last = "", 0, -1
    for receipt in [*receipts, "."]:
        token, _, index = receipt.partition(".")
        if token == lease and index and int(index) == last + 1:
            last += 1
            continue
        if lease:
            items.append(SettleItem(receipt=f"{lease}.{first}-{last}", action="ack"))
        if index:
            lease, first, last = token, int(index), int(index)
    return items


async def consume(spec: dict[str, Any]) -> dict[str, Any]:
    """Receive and acknowledge until the file `stop` exists and no message is left."""
    http = HttpClient(spec["url"])
    path = f"/v1/groups/{GROUP}/receive"

    async def receive(wait: float) -> Received:
        request = Receive(instance="bench", topics=spec["topics"], max=MAX, wait=wait, lease=60)
        return _decode(await http.call("POST", path, encode_msgpack(request), 90))

    await receive(0)
    print("subscribed", flush=True)
    counts: Counter[str] = Counter()
    latencies = array("d")
    handled: dict[str, float] = {}
    first_at = last_at = 0.0
    settling: set[asyncio.Task[bytes]] = set()
    stop = Path(spec["stop"])
    while True:
        messages = (await receive(0.3)).messages
        if not messages:
            if await asyncio.to_thread(stop.exists):
                break
            continue
        now = time.time()
        last_at = time.perf_counter()
        first_at = first_at or last_at
        counts.update([message.id for message in messages])
        if spec.get("handled"):
            handled.update([(message.id.partition(".")[0], now) for message in messages])
        timed = messages if len(messages) < 200 else messages[:1]
        latencies.extend([now - datetime.fromisoformat(message.committed_at).timestamp() for message in timed])
        body = encode_msgpack(Settle(ranges([message.receipt for message in messages])))
        settle = asyncio.ensure_future(http.call("POST", f"/v1/groups/{GROUP}/settle", body, 60))
        settling.add(settle)
        settle.add_done_callback(settling.discard)
    await asyncio.gather(*settling)
    http.close()
    by_transaction: Counter[str] = Counter()
    for message_id, count in counts.items():
        by_transaction[message_id.partition(".")[0]] += count
    await asyncio.to_thread(Path(spec["seen"]).write_text, json.dumps(by_transaction))
    if spec.get("handled"):
        await asyncio.to_thread(Path(spec["handled"]).write_text, json.dumps(handled))
    delivered = sum(counts.values())
    return {
        "delivered": delivered,
        "per_second": delivered / max(last_at - first_at, 1e-9),
        "counts_file": spec["seen"],
        "latencies": sorted(latencies)[:: max(1, len(latencies) // 20_000)],
    }


def main() -> None:
    """Run the consumer with the specification in argv[1]."""
    gc.freeze()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(consume(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
