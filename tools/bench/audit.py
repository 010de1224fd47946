"""`make bench-audit TRANSACTIONS=… RATE=…`: measures audits of TRANSACTIONS, of twice as many, and of a fifth.

T and E come by JDBC from a real database, H, Q and A from a real log. Each audit is a separate process that starts
cold. The first audit of a log copies its segments. The others compare the segments with the copies: with a digest first
and in full, twice by turns. Then the run gets 1 % more transactions, and another audit continues the last one
(`--continue`). That audit also reads the ten minutes before, because ids have the times of producers' clocks. RATE, the
number of transactions a second, therefore decides how large a part of the run it reads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from notify.runtime.signals import exit_on_signal
from notify.testing.databases import SERVERS
from tools.bench.made_run import add_to, made_run
from tools.bench.measured_audit import measured_audit

FIRST, DIGEST, FULL, CONTINUED = "with copies", "digest first", "full", "of 1 % more, --continue"
AUDITS = ((FIRST, "--full"), (DIGEST, ""), (FULL, "--full"), (DIGEST, ""), (FULL, "--full"), (CONTINUED, "--continue"))


def of_size(count: int, rate: int, database: str, directory: Path) -> list[dict[str, Any]]:
    """Make a run of `count` transactions, `rate` a second, in an empty directory, and run all AUDITS of it.

    Returns the figures of each audit.
    """
    with SERVERS[database](durable=False) as url:
        made = made_run(directory, url, count, step_us=1_000_000 // rate)
        figures = []
        for name, flag in AUDITS:
            if name == CONTINUED:
                add_to(made, directory, url, count // 100)
            measured = measured_audit({"shop": url}, [made.log], directory / "report", [flag] if flag else [])
            figures.append({"audit": name} | measured)
            print(json.dumps(figures[-1]), flush=True)
        return figures


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as a table of docs/performance.md."""
    rows = ["| transactions | audit | seconds | JVM, peak | Python, peak |", "|---|---|---|---|---|"]
    for row in figures:
        steps = ", ".join(f"{name} {seconds:,.0f}" for name, seconds in row["steps"].items() if seconds >= 1)
        rows.append(
            f"| {row['transactions']:,} | {row['audit']} | {row['seconds']:,.0f} ({steps}) | "
            f"{row['jvm_peak_mb']:,} MiB | {row['python_peak_mb']:,} MiB |"
        )
    return "\n".join(rows)


def ratios(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios between the audits of one run, by the seconds that they report; the faster of two equal audits counts."""
    seconds: dict[str, float] = {}
    for row in figures:
        name = row["audit"]
        seconds[name] = min(row["audit_seconds"], seconds.get(name, row["audit_seconds"]))
    return {
        "digest_to_full": round(seconds[DIGEST] / seconds[FULL], 2),
        "continued_to_first": round(seconds[CONTINUED] / seconds[FIRST], 2),
        "full_seconds": seconds[FULL],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=5_000_000)
    parser.add_argument("--rate", type=int, default=10_000, help="Transactions a second of the run.")
    parser.add_argument("--one-size", action="store_true", help="Only this size, not a fifth of it nor twice as much.")
    parser.add_argument("--database", choices=("postgresql", "mariadb"), default="postgresql")
    arguments = parser.parse_args()
    if not 1 <= arguments.rate <= 1_000_000:
        parser.error(f"--rate {arguments.rate}: it must be from 1 to 1,000,000 transactions a second")
    count = arguments.transactions
    figures: list[dict[str, Any]] = []
    for size in (count,) if arguments.one_size else (count // 5, count, 2 * count):
        directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
        directory.chmod(0o755)
        try:
            run = of_size(size, arguments.rate, arguments.database, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        figures += run
        print(json.dumps({"transactions": size, "rate": arguments.rate} | ratios(run)), flush=True)
    print(table(figures))


if __name__ == "__main__":
    with exit_on_signal():
        main()
