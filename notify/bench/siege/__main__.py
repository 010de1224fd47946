"""A server under siege: all attacks of strangers and of clients with few rights, beside a producer and a consumer.

The rates of producer and consumer are measured without the attacks, with them, and without them again. During the
attacks they must keep half, and the server's memory may grow by less than 100 MiB. Attackers, producer and consumer are
separate processes. On few cores any client takes CPU time from the server, so the attackers' own CPU is bounded
(`--share` of one core): the run measures what their requests cost the server.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from notify.bench.siege.attackers import attack
from notify.bench.siege.listener import Listener
from notify.bench.siege.load import load
from notify.bench.siege.phase import Measured
from notify.bench.siege.stage import prepare
from notify.ending import exiting_when_told
from notify.testing.process import ServerProcess

KEPT_SHARE = 0.5
GROWTH_BYTES = 100 << 20
WARM_SECONDS = 5.0


def besiege(directory: Path, seconds: float, share: float, only: str = "") -> bool:
    """Run all phases, print figures and verdict, and return whether it is PASS."""
    provider, webhook = Listener(b""), Listener(b"y")
    environment = {
        "NOTIFY_ACCESS": "1", "NOTIFY_OIDC_ISSUER": f"http://{provider.place}", "NOTIFY_WEBHOOK_SECRET": "siege",
        "NOTIFY_WEBHOOK_HOSTS": webhook.place,
    }  # fmt: skip
    server = ServerProcess(directory / "data", environment=environment).start()
    processes: list[Any] = []
    try:
        admin = (directory / "data" / "admin.token").read_text().strip()
        rights = asyncio.run(prepare(server, admin, f"http://{webhook.place}/"))
        context = multiprocessing.get_context("spawn")
        sent, received = context.Value("q", 0), context.Value("q", 0)
        processes.append(context.Process(target=load, args=(server.url, rights["load"], sent, received), daemon=True))
        processes[0].start()
        Measured(server, sent, received, WARM_SECONDS)
        before = Measured(server, sent, received, seconds / 3)
        print(before.line("without"), flush=True)
        arguments = (server.url, f"http://{provider.place}", rights, share, only)
        processes.append(context.Process(target=attack, args=arguments, daemon=True))
        processes[1].start()
        during = Measured(server, sent, received, seconds)
        print(during.line("under siege"), flush=True)
        processes[1].terminate()
        processes[1].join()
        after = Measured(server, sent, received, seconds / 3)
        print(after.line("without again"), flush=True)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        server.stop()
        for listener in (provider, webhook):
            listener.close()
    kept = {
        "producer": during.sent / max(1e-9, (before.sent + after.sent) / 2),
        "consumer": during.received / max(1e-9, (before.received + after.received) / 2),
    }
    growth = max(0, during.most_bytes - before.most_bytes)
    good = min(kept.values()) >= KEPT_SHARE and growth < GROWTH_BYTES
    shares = ", ".join(f"the {client} keeps {share:.0%} of its rate" for client, share in kept.items())
    print(
        f"VERDICT: {'PASS' if good else 'FAIL'} {shares} (at least {KEPT_SHARE:.0%}), memory grows by "
        f"{growth / (1 << 20):.0f} MiB (less than {GROWTH_BYTES >> 20})"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of the siege; a third of it before and after")
    parser.add_argument("--share", type=float, default=0.2, help="of one core: the attackers' own CPU")
    parser.add_argument("--only", default="", help="one attack by its name, to see what it costs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        good = besiege(Path(directory), given.seconds, given.share, given.only)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    with exiting_when_told():
        main()
