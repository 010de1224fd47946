"""Times the console's pages with 10 million messages in 10,000 topics: the slowest of five requests for each page."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import urllib.request
from pathlib import Path

from notify.cli.bench.runner import call, subscribe
from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.protocol.wire import PackedMessages, PackedPublished, encode_msgpack
from notify.runtime.signals import exit_on_signal
from notify.testing.process import ServerProcess

BAR_SECONDS = 0.3
BATCH = 4096
ROUNDS = 5


async def fill(url: str, messages: int, topics: int) -> None:
    """Publish messages to all topics in batches, with four requests at the same time."""
    http = HttpClient(url)
    slots = asyncio.Semaphore(4)

    async def send(first: int) -> None:
        async with slots:
            batch = [
                PackedPublished(topic=f"topic.{(first + n) % topics:05d}", body=b"x" * 64, key=str(first + n))
                for n in range(min(BATCH, messages - first))
            ]
            await http.call("POST", "/v1/messages", encode_msgpack(PackedMessages(messages=batch)), 60)

    await asyncio.gather(*[send(first) for first in range(0, messages, BATCH)])
    http.close()


def timed(url: str, path: str) -> float:
    """The seconds of the slowest of several requests."""
    slowest = 0.0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            answer.read()
        slowest = max(slowest, time.perf_counter() - began)
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--topics", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            began = time.perf_counter()
            asyncio.run(fill(server.url, arguments.messages, arguments.topics))
            print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
            for group in ("points", "mail"):
                for n in range(200):
                    subscribe(server.url, group, f"topic.{n:05d}", max_attempts=1)
            undecided = ids.to_text(ids.new_id())
            half = {"id": undecided, "messages": [{"topic": "topic.00001", "body": "x"}]}
            call(server.url, "POST", "/v1/transactions", {"producer_group": "shop", "transactions": [half]})
            request = {"instance": "i", "wait": 1, "max": 500, "lease": 60}
            received = call(server.url, "POST", "/v1/groups/points/receive", request)["messages"]
            receipts = [message["receipt"] for message in received]
            items = [{"receipt": receipt, "action": "dead_letter", "reason": "bench"} for receipt in receipts]
            call(server.url, "POST", "/v1/groups/points/settle", {"items": items})
            pages = [
                "/", "/transactions", f"/transactions/{undecided}", "/messages?key=77", "/messages?topic=topic.00001",
                f"/messages/{received[0]['id']}", "/topics", "/topics?after=topic.05000", "/topics?prefix=topic.09",
                "/topics/topic.00001", "/groups", "/groups/points", "/groups/points/dead-letters", "/dead-letters",
                "/nodes", "/audits", "/jobs", "/settings", "/access", "/actions", "/do/topic.put",
            ]  # fmt: skip
            slow = 0
            for path in pages:
                seconds = timed(server.url, path)
                slow += seconds > BAR_SECONDS
                print(f"{seconds * 1000:7.1f} ms  {path}", flush=True)
        finally:
            server.stop()
    print(f"VERDICT: {'FAIL' if slow else 'PASS'} {slow} of {len(pages)} pages above {BAR_SECONDS * 1000:.0f} ms")
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    with exit_on_signal():
        main()
