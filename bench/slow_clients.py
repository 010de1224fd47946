"""p99 of transactions alone, beside 500 sockets that send a byte a second, and alone again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from notify import ids
from notify.client.http import HttpClient
from notify.testing.process import ServerProcess
from notify.wire import OutcomeItem, Outcomes, PackedMessage, PackedTransaction, PackedTransactions, encode_msgpack

CALLERS = 16
RATIO = 2.0
HEAD = b"POST /v1/transactions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n"


async def slow(host: str, port: int, number: int) -> None:
    """One socket: half of them never end their head, half never their body. Cut off, it comes again."""
    sent = HEAD if number % 2 else HEAD + b"\r\n"
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(sent)
                for n in range(60):
                    writer.write(b"x-%d: y\r\n" % n if number % 2 else b" ")
                    await writer.drain()
                    if await _ended(reader):
                        break
            finally:
                writer.close()
        await asyncio.sleep(0.1)


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1000), 1) == b""
    except TimeoutError:
        return False


async def p99_ms(url: str, seconds: float) -> float:
    """Of half and outcome, each its own request, by some callers one after the other."""
    http = HttpClient(url)
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < until:
            name = ids.to_text(ids.new_id())
            half = PackedTransaction(id=name, messages=[PackedMessage(topic="t", body=b"x" * 200)])
            began = time.perf_counter()
            request = PackedTransactions(producer_group="g", transactions=[half])
            await http.call("POST", "/v1/transactions", encode_msgpack(request), 10)
            outcome = Outcomes(producer_group="g", outcomes=[OutcomeItem(id=name, outcome="COMMIT")])
            await http.call("POST", "/v1/transactions/outcomes", encode_msgpack(outcome), 10)
            times.append(time.perf_counter() - began)

    await asyncio.gather(*[caller() for _ in range(CALLERS)])
    http.close()
    return sorted(times)[int(len(times) * 0.99)] * 1000


async def run(url: str, sockets: int, seconds: float) -> bool:
    parts = urlsplit(url)
    await p99_ms(url, 2)
    before = await p99_ms(url, seconds)
    tasks = [asyncio.create_task(slow(parts.hostname or "", parts.port or 0, number)) for number in range(sockets)]
    await asyncio.sleep(3)
    beside = await p99_ms(url, seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    after = await p99_ms(url, seconds)
    ratio = beside / max(before, after)
    print(f"p99 alone {before:.1f} ms, beside {sockets} slow sockets {beside:.1f} ms, alone again {after:.1f} ms")
    print(f"VERDICT: {'PASS' if ratio <= RATIO else 'FAIL'} {ratio:.2f} times (at most {RATIO:g})")
    return ratio <= RATIO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data").start()
        try:
            good = asyncio.run(run(server.url, given.sockets, given.seconds))
        finally:
            server.stop()
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
