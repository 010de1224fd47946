"""Fills topics with a pile of messages.

Run as `python -m tools.bench.fill` with a JSON specification as its argument; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from typing import Any

from notify.cli.bench.runner import Process
from notify.client.threads.loop import new_event_loop
from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.protocol.wire import PackedMessages, PackedPublished, encode_msgpack

BATCH = 2000
"""The messages of a request."""
IN_FLIGHT = 3


def order(number: int, size: int) -> bytes:
    """A JSON object with a number, of `size` bytes if they are enough."""
    body = b'{"number":%d,"text":""}' % number
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


async def fill(spec: dict[str, Any]) -> dict[str, Any]:
    """Publish `messages` messages with bodies of `body` bytes to the topics `{prefix}-0`, `{prefix}-1`, … in turn.

    With `orders` each body is JSON with the message's number; otherwise all have the same random bytes.
    """
    http = HttpClient(spec["url"])
    body = os.urandom(spec["body"])
    topics, prefix = spec["topics"], spec.get("prefix", "bench")
    keys = spec.get("keys", 0)
    firsts = iter(range(0, spec["messages"], BATCH))
    delay = spec.get("delay")

    def message(n: int) -> PackedPublished:
        return PackedPublished(
            id=ids.message_id(ids.new_id(), 0),
            topic=f"{prefix}-{n % topics}",
            body=order(n, spec["body"]) if spec.get("orders") else body,
            key=f"key-{n % keys}" if keys else None,
            delay=delay,
        )

    async def send() -> None:
        for first in firsts:
            batch = [message(n) for n in range(first, min(first + BATCH, spec["messages"]))]
            await http.call("POST", "/v1/messages", encode_msgpack(PackedMessages(messages=batch)), 120)

    started = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
    http.close()
    return {"messages": spec["messages"], "seconds": time.perf_counter() - started}


def filled(url: str, **spec: Any) -> dict[str, Any]:
    """Fill topics from another process. `spec`: see `fill`. Raises NotifyError if the process failed."""
    return Process("tools.bench.fill", {"url": url} | spec).result()


def main() -> None:
    """Fill by the specification in argv[1]."""
    filling = fill(json.loads(sys.argv[1]))
    gc.freeze()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(filling)))


if __name__ == "__main__":
    main()
