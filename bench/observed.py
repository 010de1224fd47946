"""What watching costs: the server's CPU time a transaction bare, with metrics scraped and the console open, and with
traces too.

By turns, so that the machine's moods fall on all alike. The CPU time is what limits a server that is given enough to
do; transactions a second are shown, too, and vary more than what is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from notify import ids
from notify.bench.server import ServerProcess
from notify.client.http import HttpClient
from notify.wire import OutcomeItem, Outcomes, PackedMessage, PackedTransaction, PackedTransactions, encode_msgpack

CALLERS = 128
TRACED_SHARE = 100
"""With traces one transaction in so many is sampled, as services do."""
BAR = 0.05


async def rate(url: str, seconds: float, traced: bool) -> float:
    """Transactions a second, in batches as the SDK sends them."""
    http = HttpClient(url)
    until = time.perf_counter() + seconds
    done = 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < until:
            names = [ids.to_text(ids.new_id()) for _ in range(16)]
            halves = []
            for n, name in enumerate(names):
                sampled = traced and (done + n) % TRACED_SHARE == 0
                headers = {"traceparent": f"00-{name.replace('-', '')}-00000000000000a1-01"} if sampled else None
                message = PackedMessage(topic="t", body=b"x" * 200, headers=headers)
                halves.append(PackedTransaction(id=name, messages=[message]))
            request = PackedTransactions(producer_group="g", transactions=halves)
            await http.call("POST", "/v1/transactions", encode_msgpack(request), 30)
            outcomes = [OutcomeItem(id=name, outcome="COMMIT") for name in names]
            body = encode_msgpack(Outcomes(producer_group="g", outcomes=outcomes))
            await http.call("POST", "/v1/transactions/outcomes", body, 30)
            done += len(names)

    await asyncio.gather(*[caller() for _ in range(CALLERS // 16)])
    http.close()
    return done / seconds


class _Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


COLLECTOR = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)


class Watcher:
    """Prometheus every 5 s (a server is scraped every 15 s and more), and a console that refreshes itself."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(path, every)) for path, every in (("/metrics", 5.0), ("/", 3.0))
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, path: str, every: float) -> None:
        while not self._stop.wait(every):
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                answer.read()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def cpu_seconds(server: ServerProcess) -> float:
    """User and system time of the process so far."""
    assert server.process is not None
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one(kind: str, seconds: float) -> tuple[float, float]:
    """Transactions a second, and microseconds of CPU time for each."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{COLLECTOR.server_port}"}
    if kind == "bare":
        off = ("DOUBT_SECONDS", "NO_CONSUMER_SECONDS", "PARKED", "LAG_GROWING_SECONDS")
        environment = {f"NOTIFY_ALARM_{name}": "0" for name in off} | {"NOTIFY_ALARM_EVERY_SECONDS": "300"}
    if kind == "traced":
        environment["NOTIFY_TRACING"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data", environment=environment).start()
        watcher = Watcher(server.url) if kind != "bare" else None
        try:
            asyncio.run(rate(server.url, 2, kind == "traced"))
            before = cpu_seconds(server)
            per_second = asyncio.run(rate(server.url, seconds, kind == "traced"))
            return per_second, (cpu_seconds(server) - before) / (per_second * seconds) * 1e6
        finally:
            if watcher is not None:
                watcher.stop()
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8)
    given = parser.parse_args()
    threading.Thread(target=COLLECTOR.serve_forever, daemon=True).start()
    found: dict[str, list[float]] = {"bare": [], "watched": [], "traced": []}
    for _ in range(given.rounds):
        for kind, times in found.items():
            per_second, microseconds = one(kind, given.seconds)
            times.append(microseconds)
            print(f"{kind:8} {per_second:,.0f}/s, {microseconds:.2f} µs of CPU each", flush=True)
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    costs = {kind: medians[kind] / medians["bare"] - 1 for kind in ("watched", "traced")}
    shown = [f"{kind} {medians[kind]:.2f} µs ({cost:+.1%})" for kind, cost in costs.items()]
    print(f"bare {medians['bare']:.2f} µs, " + ", ".join(shown))
    slow = max(costs.values()) > BAR
    print(f"VERDICT: {'FAIL' if slow else 'PASS'} at most {BAR:.0%} is allowed")
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()
