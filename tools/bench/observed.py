"""Measures the cost of observation: the server's CPU time a transaction with metrics and console, and with traces.

One server runs short windows of each kind by turns, because two processes, or two minutes on the same machine, differ
by more than the cost. Each window is compared with the bare windows before and after it. The figure is CPU time,
because CPU time limits a busy server, and because transactions a second vary too much.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from notify.client.transport.http import HttpClient
from notify.protocol import ids
from notify.protocol.wire import (
    OutcomeItem,
    Outcomes,
    PackedMessage,
    PackedTransaction,
    PackedTransactions,
    encode_msgpack,
)
from notify.runtime.signals import exit_on_signal
from notify.testing.process import ServerProcess

CALLERS = 128
BATCH = 16
PACE_SECONDS = 0.0128
"""The time between two batches of a caller, for 10,000 transactions a second in total."""
EXPORT_MS = 1000
"""Spans are exported five times as often as by default, so that a window exports its own spans."""
BAR = 0.05


async def rate(url: str, seconds: float, one_in: int = 0) -> float:
    """Send batches as the SDK does, with a trace in one of `one_in` transactions. Returns transactions a second.

    The pace is half of the server's rate: at its limit the size of group commits, and therefore the CPU time of a
    transaction, varies by a third.
    """
    http = HttpClient(url)
    until = time.perf_counter() + seconds
    done = 0

    async def caller(number: int) -> None:
        nonlocal done
        due = time.perf_counter() + PACE_SECONDS * number * BATCH / CALLERS
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += PACE_SECONDS
            batch = [ids.to_text(ids.new_id()) for _ in range(BATCH)]
            halves = []
            for n, transaction_id in enumerate(batch):
                is_sampled = one_in and (done + n) % one_in == 0
                trace = f"00-{transaction_id.replace('-', '')}-00000000000000a1-01"
                headers = {"traceparent": trace} if is_sampled else None
                message = PackedMessage(topic="t", body=b"x" * 200, headers=headers)
                halves.append(PackedTransaction(id=transaction_id, messages=[message]))
            request = PackedTransactions(producer_group="g", transactions=halves)
            await http.call("POST", "/v1/transactions", encode_msgpack(request), 30)
            outcomes = [OutcomeItem(id=transaction_id, outcome="COMMIT") for transaction_id in batch]
            body = encode_msgpack(Outcomes(producer_group="g", outcomes=outcomes))
            await http.call("POST", "/v1/transactions/outcomes", body, 30)
            done += len(batch)

    await asyncio.gather(*[caller(n) for n in range(CALLERS // BATCH)])
    http.close()
    return done / seconds


class _Collector(http.server.BaseHTTPRequestHandler):
    """Accepts spans and drops them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Does not log."""


class Watcher:
    """Scrapes the metrics and refreshes the console, each once in a window of 3 s.

    That is five times as often as Prometheus scrapes, and as often as the console's overview refreshes itself.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._thread = threading.Thread(target=self._ask, args=(seconds,))
        self._thread.start()

    def _ask(self, seconds: float) -> None:
        for path in ("/metrics", "/"):
            time.sleep(seconds / 3)
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                answer.read()

    def stop(self) -> None:
        self._thread.join()


def window(server: ServerProcess, kind: str, seconds: float, one_in: int = 0) -> tuple[float, float]:
    """(transactions a second, microseconds of CPU time a transaction) of one window."""
    watcher = Watcher(server.url, seconds) if kind != "bare" else None
    before = server.cpu_seconds()
    per_second = asyncio.run(rate(server.url, seconds, one_in if kind == "traced" else 0))
    if watcher is not None:
        watcher.stop()
    time.sleep(2 * EXPORT_MS / 1000)  # remaining work, such as exporting spans, belongs to this window
    return per_second, (server.cpu_seconds() - before) / (per_second * seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--one-in", type=int, default=1000, help="transactions of which one is sampled")
    arguments = parser.parse_args()
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_MS),
        "NOTIFY_TRACING": "1",
    }
    costs: dict[str, list[float]] = {"watched": [], "traced": []}
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data", environment=environment).start()
        try:
            window(server, "bare", arguments.seconds)
            before = window(server, "bare", arguments.seconds)[1]
            for _ in range(arguments.rounds):
                for kind, ratios in costs.items():
                    per_second, cost = window(server, kind, arguments.seconds, arguments.one_in)
                    after = window(server, "bare", arguments.seconds)[1]
                    ratios.append(2 * cost / (before + after) - 1)
                    bare.append(after)
                    before = after
                    print(f"{kind:8} {per_second:,.0f}/s, {cost:.2f} µs of CPU each: {ratios[-1]:+.1%}", flush=True)
        finally:
            server.stop()
    print(f"bare {statistics.median(bare):.2f} µs of CPU a transaction")
    for kind, ratios in costs.items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{kind:8} {middle:+.1%} (half of the windows between {low:+.1%} and {high:+.1%})")
    worst = max(statistics.median(ratios) for ratios in costs.values())
    print(f"VERDICT: {'FAIL' if worst > BAR else 'PASS'} at most {BAR:.0%} is allowed")
    raise SystemExit(1 if worst > BAR else 0)


if __name__ == "__main__":
    with exit_on_signal():
        main()
