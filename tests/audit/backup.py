"""A backup taken under load, restored elsewhere, and audited against the database: clean up to the moment it was taken.

Run as `python -m tests.audit.backup`. The shop runs during the backup and after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from notify.testing.process import ServerProcess
from tests.audit.shop import TOPIC, Shop
from tests.support.clock import eventually
from tests.support.http import admin
from tests.support.verdict import judged

PRODUCERS = 4
ORDERS_BEFORE, ORDERS_AFTER = 1000, 100
LONGEST_SECONDS = 600
"""The longest time of a step, on the slowest machine."""


def notify(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", *words, "--json"],
        capture_output=True, text=True, timeout=LONGEST_SECONDS,
    )  # fmt: skip
    if not done.stdout:
        raise SystemExit(f"{words[0]}: {done.stderr[-1000:]}")
    return done.returncode, json.loads(done.stdout)


def settled(url: str) -> int:
    """The offset below which the group has settled all messages."""
    return sum(queue["position"] for queue in admin(url, "GET", "groups/points")["queues"] if queue["topic"] == TOPIC)


def more_orders(shop: Shop, count: int) -> None:
    """Wait until so many orders are committed."""
    before = len(shop.transactions())
    eventually(lambda: len(shop.transactions()) >= before + count, f"{count} more orders", LONGEST_SECONDS)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="notify-backup-") as place:
        directory = Path(place)
        server = ServerProcess(directory / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
        url = f"sqlite:///{directory}/shop.db"
        shop = Shop(url, server.url)
        with shop.busy(PRODUCERS):
            more_orders(shop, ORDERS_BEFORE)
            until = datetime.now(UTC)
            more_orders(shop, PRODUCERS)  # SQLite writes one after the other: what was being written then, is
            committed = shop.transactions()
            eventually(lambda: committed <= shop.effects(), "the effects of what was on its way", LONGEST_SECONDS)
            queued = len(shop.transactions())  # at most so many: offsets below have their messages
            eventually(lambda: settled(server.url) >= queued, "what took effect to be acknowledged", LONGEST_SECONDS)
            began = time.perf_counter()
            _, made = notify("backup", str(directory / "copy"), "--url", server.url, "--reason", "campaign")
            print(f"backup of {made['bytes']:,} bytes in {time.perf_counter() - began:.1f} s, under load", flush=True)
            more_orders(shop, ORDERS_AFTER)
        shop.close()
        server.stop()
        code, restored = notify("restore", str(directory / "copy"), "--data-dir", str(directory / "elsewhere"))
        print(f"restored: {restored}", flush=True)
        audited, result = notify(
            "audit", "run", "--database", f"shop={url}", "--log", str(directory / "elsewhere"),
            "--to", until.isoformat(), "--report", str(directory / "report"), "--max-transaction-seconds", "2",
            "--deliver-seconds", "2",
        )  # fmt: skip
    counts = {name: count for name, count in result["counts"].items() if count}
    good = code == 0 and audited == 0 and result["verdict"] == "PASS" and result["totals"]["committed"] > 0
    print(f"VERDICT: {'PASS' if good else 'FAIL'} audit of the restored log: {result['verdict']} {counts} "
          f"{result['totals']['committed']:,} committed {result['reasons'][:2]}")  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(judged(main))
