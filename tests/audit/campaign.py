"""Faults of every class planted among many transactions: the audit must find each, name none wrongly, and no other.

Run as `python -m tests.audit.campaign --transactions 1000000 --each 100`. First it audits the sound run, which must
have no finding; then the copies with the faults; then copies of a trade of several services, each after a disaster of
its own (disasters.py); then whole runs of an audit, its plan, repairs that are killed, and another audit
(killed_repair.py).
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from pyspark.sql import SparkSession

from notify.spark.audit import Audit
from notify.spark.result import Inputs, Plan, Result
from notify.spark.session import open_session
from notify.testing.databases import SERVERS
from tests.audit.audited import PLAN, audited
from tests.audit.disasters import DISASTERS, HARMLESS, Outcome, complaints_of_harmless, outcome_of
from tests.audit.killed_repair import whole_runs
from tests.audit.leaving import WHO, WHY, told
from tests.audit.plant import Planted, Planter, copied
from tests.audit.trade import Trade, make_trade
from tests.audit.world import World, world_of
from tests.support.verdict import concluded, judged
from tools.bench.made_run import Made, made_run

LEDGER = "SELECT message_id FROM ledger"
AT_ONCE = 50
"""So many transactions of the disasters' trade are stored in one batch."""
WITH_EFFECTS = replace(PLAN, effects=(("", LEDGER),))
"""A plan with --effects: `Planter` makes a ledger with doubled entries."""


def planted(made: Made, url: str, to: Path, each: int) -> Planted:
    """Plant the faults in a copy of the log and in the database."""
    engine = sa.create_engine(url)
    try:
        return asyncio.run(Planter(made, copied(made.log, to), engine, each).plant())
    finally:
        engine.dispose()


def found_ids(result: Result) -> dict[str, set[str]]:
    """The ids of an audit's findings by class, named as `Planted` names them."""
    ids_by_class: dict[str, set[str]] = {}
    for f in result.found:
        name = f"{f.evidence['from']} {f.evidence['to']}" if f.finding == "BRIDGE_GAP" else f.message_id
        name = name or f.evidence["id"]
        ids_by_class.setdefault(f.finding, set()).add(name)
    return ids_by_class


def comparison(result: Result, wanted: Planted) -> Iterator[str]:
    """A line for each class: how many faults were planted, how many of these were found, and how many others."""
    ids_by_class = found_ids(result)
    for name in sorted(ids_by_class.keys() | wanted.ids.keys()):
        planted, found = wanted.ids.get(name, set()), ids_by_class.get(name, set())
        yield f"{name:<16} planted {len(planted):>4}, found {len(planted & found):>4}, others {len(found - planted):>4}"


def differences(result: Result, wanted: Planted) -> list[str]:
    """Complaints about planted faults that were not found and findings that were not planted, by class."""
    ids_by_class = found_ids(result)
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
    causes = {key: (len(of_it), WHO, WHY) for key, of_it in wanted.left.items()}
    if told(result.left_out) != causes:
        complaints.append(f"LEFT_OUT: told as {told(result.left_out)}, planted as {causes}")
    return complaints


def campaign(
    spark: SparkSession, url: str, directory: Path, transactions: int, each: int, say: Callable[[str], None]
) -> list[str]:
    """Run both audits, and return their complaints."""
    made = made_run(directory, url, transactions)
    say(f"{transactions} transactions made")
    return [*sound_run(spark, url, made, directory, say), *faulty_run(spark, url, made, directory, each, say)]


def sound_run(spark: SparkSession, url: str, made: Made, directory: Path, say: Callable[[str], None]) -> list[str]:
    """Audit a run without faults, and return complaints."""
    clean = audited(spark, url, made.log, directory / "clean")
    say(f"clean run: {clean.verdict}, {clean.seconds:.0f} s")
    if clean.verdict == "PASS" and not clean.found:
        return []
    return [f"clean run: {clean.verdict} {clean.counts} {clean.reasons}"]


def faulty_run(
    spark: SparkSession, url: str, made: Made, directory: Path, each: int, say: Callable[[str], None]
) -> list[str]:
    """Plant so many faults of each class, audit, and return complaints."""
    wanted = planted(made, url, directory / "faulty", each)
    faulty = audited(spark, url, directory / "faulty", directory / "scratch", WITH_EFFECTS)
    say(f"faulty run: {faulty.seconds:.0f} s, {faulty.verdict}, {faulty.counts}")
    for line in comparison(faulty, wanted):
        say(line)
    return differences(faulty, wanted)


def disasters(spark: SparkSession, directory: Path, count: int, say: Callable[[str], None]) -> list[str]:
    """Audit copies of a trade with so many transactions, each after another disaster; print a table, and return
    complaints. Each is audited whole, by a range that has all of it, and with a digest first."""
    sound = make_trade(directory / "trade", count=count, at_once=AT_ONCE)
    other = make_trade(directory / "other", 2, count=count, at_once=AT_ONCE, body=b"y" * 150)
    full = replace(PLAN, method="full")
    plans = {"full": full, "range": replace(full, from_us=sound.first_us), "digest": replace(PLAN, method="digest")}
    complaints = []
    for name, plan in plans.items():
        for number, disaster in enumerate(DISASTERS):
            with _harmed(sound, other, directory / "harmed") as world:
                outcome = outcome_of(disaster, world, partial(_audited, spark, plan, directory))
            say(f"{name:<6} {number + 1:>2} {row_of(outcome)}")
            complaints += [f"{name} {disaster.kind} {disaster.name}: {wrong}" for wrong in outcome.wrong]
        for what, harm in HARMLESS:
            with _harmed(sound, other, directory / "harmed") as world:
                wrong = complaints_of_harmless(harm, world, partial(_audited, spark, plan, directory))
            say(f"{name:<6}    harmless   {what:<52} {'wrong' if wrong else 'PASS'}")
            complaints += [f"{name} {what}: {text}" for text in wrong]
    return complaints


def row_of(outcome: Outcome) -> str:
    """A line of the table of disasters: what it was, the verdict, the classes, wrong names, and the first reason."""
    named = " ".join(f"{name} {count}" for name, count in outcome.counts.items()) or "-"
    disaster, wrong = outcome.disaster, len(outcome.wrong)
    reason = outcome.reasons[0][:150] if outcome.reasons else "-"
    return f"{disaster.kind:<10} {disaster.name:<52} {outcome.verdict:<12} {named:<22} wrong: {wrong}  {reason}"


@contextmanager
def _harmed(sound: Trade, other: Trade, to: Path) -> Iterator[World]:
    try:
        yield world_of(sound, other, to)
    finally:
        shutil.rmtree(to)


def _audited(spark: SparkSession, plan: Plan, directory: Path, inputs: Inputs) -> Result:
    """Audit with copies of segments of its own, as disasters change files within moments."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        return Audit(spark, plan, inputs, Path(scratch)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=1_000_000)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--disasters", type=int, default=10_000, help="transactions of their trade; 0: no disasters")
    parser.add_argument("--repairs", type=int, default=10, help="whole runs with repairs that are killed; 0: none")
    parser.add_argument("--database", choices=sorted(SERVERS), default="postgresql")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="notify-audit-"))
    directory.chmod(0o755)
    try:
        with SERVERS[given.database]() as url:
            spark = open_session()
            complaints = campaign(spark, url, directory, given.transactions, given.each, say)
            if given.disasters:
                complaints += disasters(spark, directory, given.disasters, say)
        if given.repairs:
            with SERVERS["postgresql"]() as url:
                complaints += whole_runs(spark, url, directory, given.repairs, say)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    classes = f"{given.each} faults of each class among {given.transactions} transactions"
    if given.disasters:
        classes += f", {len(DISASTERS)} disasters among {given.disasters}, three times each"
    if given.repairs:
        classes += f", {given.repairs} whole runs with killed repairs"
    return concluded(complaints, f"{classes}: " + ("see above" if complaints else "all found, no other, none misnamed"))


if __name__ == "__main__":
    sys.exit(judged(main))
