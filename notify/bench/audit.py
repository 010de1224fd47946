"""Measures an audit of 5 million transactions, T and E by JDBC from a real database, H, Q and A from a real log.

Each audit is a process of its own, started cold: its time includes Spark's start and the copy of the log's segments.
Memory is the sum of its JVM, its Python workers and itself, sampled every half second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from notify.bench.made_run import made_run
from notify.testing.databases import SERVERS
from notify.testing.usage import resident_mb


def audit(url: str, log: Path, report: Path) -> dict[str, float]:
    """Run the command once, and measure it."""
    command = [
        sys.executable, "-m", "notify.cli.main", "audit", "run", "--json", "--database", f"shop={url}",
        "--log", str(log), "--report", str(report), "--max-transaction-seconds", "5", "--deliver-seconds", "5",
    ]  # fmt: skip
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0.0
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.5):
            peak = max(peak, resident_mb(process.pid))

    watching = threading.Thread(target=look)
    watching.start()
    out, _ = process.communicate()
    done.set()
    watching.join()
    result = json.loads(out)
    assert result["verdict"] == "PASS", result["counts"]
    return {
        "transactions": result["totals"]["committed"],
        "seconds": round(time.monotonic() - started, 1),
        "peak_mb": round(peak),
        **{f"{name} s": seconds for name, seconds in result["steps"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=5_000_000)
    parser.add_argument("--database", choices=("postgresql", "mariadb"), default="postgresql")
    given = parser.parse_args()
    seconds = []
    for count in (given.transactions, 2 * given.transactions):
        directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
        directory.chmod(0o755)
        try:
            with SERVERS[given.database]() as url:
                made = made_run(directory, url, count)
                for again in (False, True):
                    figures = audit(url, made.log, directory / "report")
                    print(json.dumps({"segments copied before": again} | figures), flush=True)
                    if not again:
                        seconds.append(figures["seconds"])
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps({"ratio_of_twice_the_work": round(seconds[1] / seconds[0], 2)}))


if __name__ == "__main__":
    main()
