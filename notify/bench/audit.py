"""`make bench-audit TRANSACTIONS=…`: an audit of so many transactions, of twice as many, and of a fifth.

T and E come by JDBC from a real database, H, Q and A from a real log. Each audit is a process of its own, started cold.
The first audit of a log copies its segments; the others, with a digest first and in full, compare them with the copies.
Then the run goes on for 1 % more, and an audit goes on where the last one ended (`--continue`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from notify.bench.made_run import add_to, made_run
from notify.bench.measured_audit import measured_audit
from notify.testing.databases import SERVERS

CONTINUED = "of 1 % more, --continue"


def of_size(count: int, database: str, directory: Path) -> list[dict[str, Any]]:
    """Make a run of `count` transactions in an empty directory, and audit it three times; then a hundredth more."""
    with SERVERS[database](durable=False) as url:
        made = made_run(directory, url, count)
        figures = []
        audits = [("with copies", ["--full"]), ("digest first", []), ("full", ["--full"]), (CONTINUED, ["--continue"])]
        for name, flags in audits:
            if name == CONTINUED:
                add_to(made, directory, url, count // 100)
            measured = measured_audit({"shop": url}, [made.log], directory / "report", flags)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=5_000_000)
    parser.add_argument("--database", choices=("postgresql", "mariadb"), default="postgresql")
    given = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for count in (given.transactions // 5, given.transactions, 2 * given.transactions):
        directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
        directory.chmod(0o755)
        try:
            figures += of_size(count, given.database, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(table(figures))
    again = [row["seconds"] for row in figures if row["audit"] == "full"]
    seconds = {(row["audit"], at // 4): row["seconds"] for at, row in enumerate(figures)}
    ratios = {
        "ratio_of_twice_the_work": round(again[2] / again[1], 2),
        "ratio_of_continued_to_first": round(seconds[CONTINUED, 1] / seconds["with copies", 1], 2),
    }
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
