"""A backup taken under load, restored elsewhere, and audited against the database: clean up to the moment it was taken.

Run as `python -m tests.audit.backup`. The shop goes on meanwhile, and after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from notify.client import Message
from notify.testing.process import ServerProcess
from tests.audit.test_repair import TOPIC, Order, Shop

PRODUCERS = 4
SETTLED_SECONDS = 6
"""How long before the backup the audited span ends: what was on its way then has arrived."""


def notify(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "notify.cli.main", *words, "--json"], capture_output=True, text=True, timeout=300
    )
    if not done.stdout:
        raise SystemExit(f"{words[0]}: {done.stderr[-1000:]}")
    return done.returncode, json.loads(done.stdout)


def order(shop: Shop, stop: threading.Event) -> None:
    n = 0
    while not stop.is_set():
        with Session(shop.engine) as session, session.begin():
            session.add(Order(item=str(n)))
            shop.producer.send(session, Message(TOPIC, {"n": n}, key=str(n)))
        n += 1


def main() -> int:
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="notify-backup-") as place:
        directory = Path(place)
        server = ServerProcess(directory / "data", environment={"NOTIFY_SEGMENT_BYTES": str(1 << 20)}).start()
        url = f"sqlite:///{directory}/shop.db"
        shop = Shop(url, server)
        threads = [threading.Thread(target=order, args=(shop, stop)) for _ in range(PRODUCERS)]
        threads.append(threading.Thread(target=shop.consumer.run, kwargs={"signals": False}))
        for thread in threads:
            thread.start()
        time.sleep(20)
        until = datetime.now(UTC) - timedelta(seconds=SETTLED_SECONDS)
        began = time.perf_counter()
        _, made = notify("backup", str(directory / "copy"), "--url", server.url, "--reason", "campaign")
        print(f"backup of {made['bytes']:,} bytes in {time.perf_counter() - began:.1f} s, under load", flush=True)
        time.sleep(3)
        stop.set()
        shop.consumer.stop()
        for thread in threads:
            thread.join()
        shop.producer.close()
        shop.engine.dispose()
        server.stop()
        code, found = notify("restore", str(directory / "copy"), "--data-dir", str(directory / "elsewhere"))
        print(f"restored: {found}", flush=True)
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
    raise SystemExit(main())
