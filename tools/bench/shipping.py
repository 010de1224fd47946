"""`make bench-shipping`: compares the rate of producers while the log is shipped with the rate while it is not.

Two servers take turns in windows of the same load: one ships its log, the other does not. After each window of the
server that ships, the bench waits until it has caught up, so that the other server has the machine to itself. The
figures say how long that took and how far it was behind. At the end every acknowledged message must be in the shipped
tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from notify.cli.bench.runner import Bench
from notify.errors import NotifyError
from notify.object_store.store import Store
from notify.runtime.signals import exit_on_signal
from notify.storage.shipped import manifest
from notify.testing.process import ServerProcess

BAR = 0.95
CATCH_UP_SECONDS = 600.0
LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Windows:
    """The figures of each window."""

    off: list[float]
    on: list[float]
    off_cpu_us: list[float]
    on_cpu_us: list[float]
    """The server's CPU time a transaction, without the process that ships. It varies less than the rates."""
    behind_bytes: list[int]
    catch_up_seconds: list[float]


def run(
    to: str = "",
    *,
    clients: int = 128,
    body: int = 256,
    seconds: float = 10.0,
    rounds: int = 5,
    every: float = 2.0,
    rate: float = 0.0,
) -> dict[str, Any]:
    """Measure, and return the figures by name.

    `to`: the URL of the store, "": a directory. `every`: seconds between two segments. `rate`: transactions a second,
    0: as many as possible. Raises NotifyError if a process could not run, or the store fails.
    """
    windows = Windows([], [], [], [], [], [])
    with Bench() as bench:
        store = to or f"file://{bench.directory}/store"
        off, on = bench.server("off"), bench.server("on", "--ship-to", store, "--ship-every", str(every))

        def load(server: ServerProcess) -> dict[str, Any]:
            before = server.cpu_seconds()
            result = bench.produce(server.url, clients=clients, seconds=seconds, body=body, rate=rate).result(300)
            return result | {"cpu_us": (server.cpu_seconds() - before) / max(1, result["acknowledged"]) * 1e6}

        load(off)  # the first window of a process is slower
        acknowledged: int = load(on)["acknowledged"]
        _catch_up(on)
        for number in range(rounds):
            # The first server of a round has the cooler machine, so they take turns at that, too.
            for server in (off, on) if number % 2 == 0 else (on, off):
                result = load(server)
                per_second = result["committed"] / result["seconds"]
                if server is off:
                    windows.off.append(per_second)
                    windows.off_cpu_us.append(result["cpu_us"])
                    continue
                windows.on.append(per_second)
                windows.on_cpu_us.append(result["cpu_us"])
                acknowledged += result["acknowledged"]
                windows.behind_bytes.append(_shipping(on)["behind"]["bytes"])
                windows.catch_up_seconds.append(_catch_up(on))
            print(f"off {windows.off[-1]:,.0f}/s, on {windows.on[-1]:,.0f}/s", flush=True)
        off.stop()
        on.stop()
        listed = manifest.load(Store(store))
    shipped = 0 if listed is None else _messages(listed)
    return _figures(windows, seconds, acknowledged, shipped)


def _messages(listed: manifest.Manifest) -> int:
    return sum(page.messages for page in listed.pages) + sum(segment.messages for segment in listed.segments)


def _shipping(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/v1/admin/overview", timeout=60) as answer:
        shipping: dict[str, Any] = json.load(answer)["shipping"]
        return shipping


def _catch_up(server: ServerProcess) -> float:
    """Wait until the whole log is shipped. Returns the seconds. Raises NotifyError if it takes too long."""
    began = time.monotonic()
    while (shipping := _shipping(server))["behind"]["bytes"]:
        if time.monotonic() - began > CATCH_UP_SECONDS:
            raise NotifyError(f"not shipped after {CATCH_UP_SECONDS:g} s: {shipping}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


def _figures(windows: Windows, window_seconds: float, acknowledged: int, shipped: int) -> dict[str, Any]:
    ratios = [on / off for on, off in zip(windows.on, windows.off, strict=True)]
    return {
        "off_per_second": round(statistics.median(windows.off)),
        "on_per_second": round(statistics.median(windows.on)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_lowest": round(min(ratios), 3),
        "ratio_highest": round(max(ratios), 3),
        "off_cpu_us": round(statistics.median(windows.off_cpu_us), 1),
        "on_cpu_us": round(statistics.median(windows.on_cpu_us), 1),
        "behind_mib": round(statistics.median(windows.behind_bytes) / (1 << 20), 1),
        "catch_up_seconds": round(statistics.median(windows.catch_up_seconds), 1),
        "window_seconds": window_seconds,
        "acknowledged": acknowledged,
        "shipped": shipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", default="", help="the store's URL; default: a directory on the same disk")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two segments")
    parser.add_argument("--rate", type=float, default=0.0, help="transactions/s; 0: as many as possible")
    arguments = parser.parse_args()
    figures = run(
        arguments.to,
        clients=arguments.clients,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        every=arguments.every,
        rate=arguments.rate,
    )
    print(json.dumps(figures))
    is_complete = figures["shipped"] >= figures["acknowledged"] > 0
    passed = is_complete and figures["ratio"] >= BAR
    print(f"VERDICT: {'PASS' if passed else 'FAIL'} at least {BAR:g} of the rate, and every message shipped")
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    with exit_on_signal():
        main()
