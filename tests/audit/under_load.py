"""Audits a running shop whose processes are killed: recent transactions are PENDING, and nothing is LOST.

Run as `python -m tests.audit.under_load --audits 3`. The demo does the rest: kills, checks, retries.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from notify.spark.judge.findings import BAD
from notify.storage.sql.rows import microseconds_of
from tests.support.clock import eventually
from tests.support.verdict import command_line, concluded, judged

LONGEST_SECONDS = 20.0
"""Transactions may last so long; killed servers and producers delay them by about half of it."""


def seconds_since_the_first(directory: Path) -> float:
    """The age of the demo's first transaction; 0 before there is one."""
    try:
        with closing(sqlite3.connect(f"file:{directory}/shop.db?mode=ro", uri=True)) as connection:
            (first,) = connection.execute("SELECT min(created_at) FROM half_message").fetchone()
    except sqlite3.OperationalError:  # the file or the table does not exist yet
        return 0.0
    return 0.0 if first is None else time.time() - microseconds_of(first) / 1e6


def main() -> int:
    audits = command_line(__doc__, audits=3).audits
    notify = [sys.executable, "-m", "notify.cli.main"]
    complaints = []
    with tempfile.TemporaryDirectory(prefix="notify-load-") as place:
        seconds = str(30 + 60 * audits)
        environment = os.environ | {"TMPDIR": place}
        demo = subprocess.Popen(
            [*notify, "demo", "--json", "--seconds", seconds], env=environment, stdout=subprocess.PIPE, text=True
        )
        directory: Path = eventually(lambda: next(Path(place).glob("notify-demo-*"), None), "the demo's directory")
        eventually(lambda: seconds_since_the_first(directory) > LONGEST_SECONDS, "a transaction that is closed")
        for number in range(audits):
            done = subprocess.run(
                [
                    *notify, "audit", "run", "--json", "--database", f"shop=sqlite:///{directory}/shop.db",
                    "--database", f"points=sqlite:///{directory}/points.db", "--log", str(directory / "data"),
                    "--report", f"{place}/report", "--max-transaction-seconds", str(LONGEST_SECONDS),
                    "--deliver-seconds", str(LONGEST_SECONDS), "--effects", "points:SELECT message_id FROM points",
                ],
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            if not done.stdout:
                complaints.append(f"audit {number}: exit code {done.returncode}: {done.stderr[-500:]}")
                continue
            result = json.loads(done.stdout)
            counts = {name: count for name, count in result["counts"].items() if count}
            print(f"audit {number}: {result['verdict']} {counts} {result['totals']}", flush=True)
            bad = [f for f in result["findings"] if f["finding"] in BAD]
            if bad or result["verdict"] != "PASS" or not result["totals"]["closed"]:
                complaints.append(f"audit {number}: {result['verdict']} {result['reasons']} {bad[:3]}")
        proof = json.loads(demo.communicate(timeout=300)[0])
    if not proof["ok"]:
        complaints.append(f"the demo itself: {proof}")
    summary = f"{audits} audits of {proof['committed']} orders beside {sum(proof['killed'].values())} kills"
    return concluded(complaints, f"{summary}, {sum(proof['in_doubt'].values())} outcomes asked back")


if __name__ == "__main__":
    sys.exit(judged(main))
