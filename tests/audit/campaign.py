"""Faults of every class planted among many transactions: the audit must find each, name none wrongly, and no other.

Run as `python -m tests.audit.campaign --transactions 1000000 --each 100`. First it audits the sound run, which must
have no finding; then the copies with the faults.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa
from pyspark.sql import SparkSession

from notify.bench.made_run import Made, made_run
from notify.spark.result import Result
from notify.spark.session import open_session
from notify.testing.databases import SERVERS
from tests.audit.audited import PLAN, audited
from tests.audit.plant import Planted, Planter, copied

LEDGER = "SELECT message_id FROM ledger"
WITH_EFFECTS = replace(PLAN, effects=(("", LEDGER),))
"""A plan with --effects: `Planter` makes a ledger with doubled entries."""


def planted(made: Made, url: str, to: Path, each: int) -> Planted:
    """Plant the faults in a copy of the log and in the database."""
    engine = sa.create_engine(url)
    try:
        return asyncio.run(Planter(made, copied(made.log, to), engine, each).plant())
    finally:
        engine.dispose()


def differences(result: Result, wanted: Planted) -> list[str]:
    """Complaints about planted faults that were not found and findings that were not planted, by class."""
    ids_by_class: dict[str, set[str]] = {}
    for f in result.found:
        name = f"{f.evidence['from']} {f.evidence['to']}" if f.finding == "BRIDGE_GAP" else f.message_id
        name = name or f.evidence["id"]
        ids_by_class.setdefault(f.finding, set()).add(name)
    complaints = []
    for name in sorted(ids_by_class.keys() | wanted.ids.keys()):
        missing = wanted.ids.get(name, set()) - ids_by_class.get(name, set())
        surplus = ids_by_class.get(name, set()) - wanted.ids.get(name, set())
        if missing:
            complaints.append(f"{name}: {len(missing)} not found, as {sorted(missing)[0]}")
        if surplus:
            complaints.append(f"{name}: {len(surplus)} found that were not planted, as {sorted(surplus)[0]}")
        if result.counts.get(name, 0) != len(ids_by_class.get(name, ())):
            complaints.append(f"{name}: {result.counts.get(name)} counted, {len(ids_by_class.get(name, ()))} shown")
    return complaints


def campaign(
    spark: SparkSession, url: str, directory: Path, transactions: int, each: int, say: Callable[[str], None]
) -> list[str]:
    """Run both audits, and return their complaints."""
    made = made_run(directory, url, transactions)
    say(f"{transactions} transactions made")
    clean = audited(spark, url, made.log, directory / "clean")
    complaints = (
        []
        if clean.verdict == "PASS" and not clean.found
        else [f"clean run: {clean.verdict} {clean.counts} {clean.reasons}"]
    )
    say(f"clean run: {clean.verdict}, {clean.seconds:.0f} s")
    wanted = planted(made, url, directory / "faulty", each)
    faulty = audited(spark, url, directory / "faulty", directory / "scratch", WITH_EFFECTS)
    say(f"faulty run: {faulty.seconds:.0f} s, {faulty.counts}")
    return complaints + differences(faulty, wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=1_000_000)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--database", choices=("postgresql", "mariadb"), default="postgresql")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
    directory.chmod(0o755)
    try:
        with SERVERS[given.database]() as url:
            spark = open_session()
            complaints = campaign(
                spark, url, directory, given.transactions, given.each, lambda text: print(text, flush=True)
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for complaint in complaints:
        print(complaint)
    classes = f"{given.each} faults of each class among {given.transactions} transactions"
    print(
        f"VERDICT: {'FAIL' if complaints else 'PASS'} {classes}: "
        + ("see above" if complaints else "all found, no other")
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
