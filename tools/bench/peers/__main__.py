"""`make bench-peers`: rounds of Notify, RocketMQ, Kafka and PostgreSQL; a table, bench-peers.json and bench-peers.svg.

The exit code is 0 for PASS, 1 for FAIL (a run lost or doubled messages), and 2 for INCONCLUSIVE (a system did not run).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from notify.errors import Unavailable
from notify.runtime.signals import exit_on_signal
from tools.bench.compare.ratios import Verdict
from tools.bench.peers import machine
from tools.bench.peers.chart import chart
from tools.bench.peers.comparison import Comparison
from tools.bench.peers.driver import SCRATCH
from tools.bench.peers.kafka import Kafka
from tools.bench.peers.notify_server import NotifyServer
from tools.bench.peers.postgresql import PostgreSql
from tools.bench.peers.rocketmq import RocketMq
from tools.bench.peers.rounds import Round, measure
from tools.bench.peers.system import System, Work
from tools.bench.peers.table import table

SYSTEMS: tuple[System, ...] = (NotifyServer(), RocketMq(), Kafka(), PostgreSql())


@contextmanager
def _alone() -> Iterator[None]:
    """Allow one comparison at a time, as two would disturb each other. Raises Unavailable."""
    SCRATCH.mkdir(exist_ok=True)
    with (SCRATCH / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable("another comparison is running") from None
        yield


def compare(systems: Sequence[System], given: argparse.Namespace, tell: Callable[[str], None]) -> Verdict:
    """Measure all rounds, write JSON and SVG after each, and print the table. Raises Unavailable."""
    place = Path(tempfile.gettempdir())
    if machine.file_system(place) in machine.IN_MEMORY:
        raise Unavailable(f"{place} is in memory, where nothing is synced: set TMPDIR to a directory on a disk")
    work = Work(callers=tuple(given.callers), seconds=given.seconds)
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for system in systems:
        try:
            versions[system.name] = system.version()
        except Unavailable as error:
            missing[system.name] = str(error)
            tell(f"{system.title} is not measured: {error}")
    described = machine.described(place)
    tell(", ".join(f"{name} {value}" for name, value in (described | versions).items()))
    rounds: list[Round] = []
    comparison = Comparison(systems, work, rounds, missing)
    for done in measure([system for system in systems if system.name in versions], work, given.rounds, tell):
        rounds.append(done)
        Path(f"{given.output}.json").write_text(json.dumps(comparison.as_json(described, versions), indent=1) + "\n")
        Path(f"{given.output}.svg").write_text(chart(comparison))
    tell("")
    tell(table(comparison, versions))
    for reason in comparison.reasons():
        tell(reason)
    tell(f"see {given.output}.json and {given.output}.svg")
    return comparison.verdict()


def main(words: Sequence[str] | None = None, systems: Sequence[System] = SYSTEMS) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="the length of a run")
    parser.add_argument("--callers", type=int, nargs="+", default=Work().callers, help="how many, in each run")
    parser.add_argument("--output", default="bench-peers", help="the name of the files, without their endings")
    given = parser.parse_args(words)

    def tell(line: str) -> None:
        print(line, flush=True)

    try:
        with exit_on_signal(), _alone():
            verdict = compare(systems, given, tell)
    except Unavailable as error:
        verdict = Verdict("INCONCLUSIVE", str(error))
    except (KeyboardInterrupt, SystemExit):
        verdict = Verdict("INCONCLUSIVE", "it was interrupted")
    tell(f"VERDICT: {verdict}")
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
