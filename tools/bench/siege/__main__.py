"""A server under siege: all attacks of strangers and of clients with few rights, beside producers and consumers.

Attackers, producers and consumers are processes of their own, which share this machine's cores with the server. On few
cores any client takes CPU time from the server, so the attackers' own CPU is bounded (`--share` of one core), and the
bar is measured beside a process that burns as much: during the attacks producer and consumer must keep half of that
rate, and the server's memory, with its workers, may grow by 100 MiB. Before that, loops that ask for the page to sign
in, as fast as they are answered, may make the producer's slowest hundredth ten times as slow. All of it is run with
access on and off, with one server and with workers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from notify.runtime.signals import exit_on_signal
from notify.testing import usage
from notify.testing.process import ServerProcess
from tools.bench.siege.attackers import attack, burn
from tools.bench.siege.load import Load, Measured
from tools.bench.siege.stage import Listener, prepare

KEPT_SHARE = 0.5
GROWTH_BYTES = 100 << 20
LATER = 10.0
"""How many times as late the slowest hundredth of halves may be answered while the page to sign in is asked for."""
WARM_SECONDS = 5.0
PAGES = "login_pages"
SEGMENT_BYTES = 8 << 20
"""The index of a segment is in memory until the segment is full. Small segments fill before the siege, so that what the
load's own messages take is not counted as the attackers'."""


def besiege(directory: Path, seconds: float, share: float, only: str, workers: int, access: bool) -> bool:
    """Run all phases against one server, print figures and verdict, and return whether it is PASS."""
    print(f"--- access {'on' if access else 'off'}, {workers} worker{'s' * (workers > 1)}", flush=True)
    provider, webhook = Listener(b""), Listener(b"y")
    environment = {"NOTIFY_WEBHOOK_SECRET": "siege", "NOTIFY_WEBHOOK_HOSTS": webhook.place}
    environment["NOTIFY_SEGMENT_BYTES"] = str(SEGMENT_BYTES)
    if access:
        environment |= {"NOTIFY_ACCESS": "1", "NOTIFY_OIDC_ISSUER": f"http://{provider.place}"}
    flags = ["--workers", str(workers)] if workers > 1 else []
    server = ServerProcess(directory / "data", environment=environment, flags=flags).start()
    load: Load | None = None
    others: list[Any] = []
    context = multiprocessing.get_context("spawn")

    def beside(target: Any, *arguments: Any) -> Any:
        """Another process, which runs until `end`."""
        others.append(context.Process(target=target, args=arguments, daemon=True))
        others[-1].start()
        return others[-1]

    def end(process: Any) -> None:
        process.terminate()
        process.join()

    try:
        admin = (directory / "data" / "admin.token").read_text().strip() if access else ""
        rights = asyncio.run(prepare(server, admin, f"http://{webhook.place}/"))
        load = Load(server.url, rights["load"], workers)
        Measured(server, load, WARM_SECONDS)
        idle = Measured(server, load, seconds / 3)
        print(idle.line("without"), flush=True)
        arguments = (server.url, f"http://{provider.place}", rights)
        pages = beside(attack, *arguments, float("inf"), PAGES, workers)
        Measured(server, load, WARM_SECONDS)
        asked = Measured(server, load, seconds / 3)
        print(asked.line("login pages"), flush=True)
        end(pages)
        attackers = beside(attack, *arguments, share, only, workers)
        began = time.monotonic()
        during = Measured(server, load, seconds)
        used = usage.cpu_seconds(attackers.pid) / (time.monotonic() - began)
        print(during.line("under siege") + f"  attackers {used:.2f} cores", flush=True)
        end(attackers)
        Measured(server, load, WARM_SECONDS)
        burner = beside(burn, used)
        burnt = Measured(server, load, seconds / 3)
        print(burnt.line("as much burnt"), flush=True)
        end(burner)
    finally:
        for process in [*others, *([load.process] if load is not None else [])]:
            end(process)
        server.stop()
        for listener in (provider, webhook):
            listener.close()
    return _judged(idle, asked, during, burnt)


def _judged(idle: Measured, asked: Measured, during: Measured, burnt: Measured) -> bool:
    kept = {
        "producer": during.sent / max(1e-9, burnt.sent),
        "consumer": during.received / max(1e-9, burnt.received),
    }
    growth = max(0, max(asked.most_bytes, during.most_bytes) - idle.most_bytes)
    left = max(0, burnt.last_bytes - idle.most_bytes)
    later = asked.late_seconds / max(1e-9, idle.late_seconds)
    good = min(kept.values()) >= KEPT_SHARE and growth < GROWTH_BYTES and later <= LATER
    shares = ", ".join(f"the {client} keeps {share:.0%} of its rate" for client, share in kept.items())
    print(
        f"VERDICT: {'PASS' if good else 'FAIL'} {shares} (at least {KEPT_SHARE:.0%}), memory grows by "
        f"{growth / (1 << 20):.0f} MiB (less than {GROWTH_BYTES >> 20}; {left / (1 << 20):.0f} afterwards), and beside "
        f"the page to sign in the producer's p99 is {later:.1f} times as long (at most {LATER:g})",
        flush=True,
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of the siege; a third of it for each other phase")
    parser.add_argument("--share", type=float, default=0.2, help="of one core: the attackers' own CPU")
    parser.add_argument("--only", default="", help="one attack by its name, to see what it costs")
    parser.add_argument("--workers", type=int, action="append", help="only with so many workers (default: 1 and 2)")
    parser.add_argument("--access", choices=("on", "off"), action="append", help="only with access so (default: both)")
    given = parser.parse_args()
    good = True
    for access in given.access or ("on", "off"):
        for workers in given.workers or (1, 2):
            with tempfile.TemporaryDirectory() as directory:
                good &= besiege(Path(directory), given.seconds, given.share, given.only, workers, access == "on")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    with exit_on_signal():
        main()
