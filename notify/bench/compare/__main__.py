"""`make compare BASE=<revision>`: the working tree beside a commit, as ratios of `notify bench` run by turns.

Each side runs its own code in its own environment (bench/checkout.py); bench/ratios.py computes the ratios and compares
them with the bars. The exit code is 0 for PASS, 1 for FAIL, and 2 for INCONCLUSIVE.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notify.bench.compare import checkout, ratios
from notify.bench.compare.checkout import Checkout, NotComparable
from notify.bench.compare.ratios import Verdict

BASE, HEAD = "base", "head"
RUN_SECONDS = 900.0
STOP_SECONDS = 60.0
"""How long an interrupted run may take to stop its server."""
LAST_WORDS = 2000


class RunFailed(Exception):
    """A run failed; `str()` is one line that says why."""

    word = "INCONCLUSIVE"


class Lost(RunFailed):
    """A run lost or doubled messages."""

    word = "FAIL"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its pair (from 1), its side, and its report."""

    pair: int
    side: str
    result: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        return ratios.figures(self.result)


@dataclass(slots=True)
class Comparison:
    """The runs of a comparison so far."""

    base: str
    head: str
    bench: str
    pairs: int
    runs: list[Run] = field(default_factory=list)

    def spreads(self) -> dict[str, ratios.Spread]:
        """The spread of each figure over the complete pairs."""
        sides = {(run.pair, run.side): run.figures for run in self.runs}
        numbers = [pair for pair, side in sides if side == HEAD and (pair, BASE) in sides]
        return ratios.spreads([(sides[n, BASE], sides[n, HEAD]) for n in numbers]) if numbers else {}

    def as_json(self, verdict: Verdict) -> dict[str, Any]:
        measured = {name: spread.as_json() for name, spread in self.spreads().items()}
        runs = [
            {"pair": run.pair, "side": run.side, ratios.CPU + "_us": run.figures.get(ratios.CPU), **run.result}
            for run in self.runs
        ]
        return {
            "base": self.base,
            "head": self.head,
            "bench": self.bench,
            "pairs": self.pairs,
            **dict.fromkeys((ratios.RATE, ratios.CPU, *ratios.LATENCIES)),
            **measured,
            "runs": runs,
            "verdict": str(verdict),
        }

    def table(self) -> str:
        """A line for each figure: the ratios, and the medians of both sides."""
        lines = [f"{'head by base':18} {'median':>8} {'min':>8} {'quartiles':>16} {'max':>8} {'base':>12} {'head':>12}"]
        for name, spread in self.spreads().items():
            low, high = spread.quartiles
            medians = [
                statistics.median(run.figures[name] for run in self.runs if run.side == side) for side in (BASE, HEAD)
            ]
            lines.append(
                f"{ratios.label(name):18} {spread.median:8.3f} {spread.minimum:8.3f} {low:7.3f} to {high:.3f}"
                f" {spread.maximum:8.3f} {medians[0]:12,.6g} {medians[1]:12,.6g}"
            )
        return "\n".join(lines)


def order(pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, side) of each run: the side that ran second runs first in the next pair, as the machine changes with time.

    Pair 0 is the warm-up.
    """
    yield from ((0, BASE), (0, HEAD))
    for pair in range(1, pairs + 1):
        yield from ((pair, side) for side in ((BASE, HEAD) if pair % 2 else (HEAD, BASE)))


def measure(comparison: Comparison, run: Callable[[str], dict[str, Any]], tell: Callable[[str], None]) -> None:
    """Make every run of the comparison, by turns. Raises RunFailed; earlier runs are kept."""
    for pair, side in order(comparison.pairs):
        name = f"pair {pair} of {comparison.pairs}, {side}" if pair else f"warm-up, {side}"
        try:
            done = Run(pair, side, run(side))
            tell(f"{name}: {_in_words(done.figures)}")
        except ratios.NoRate as error:
            raise RunFailed(f"{name}: {error}") from None
        except RunFailed as error:
            raise type(error)(f"{name}: {error}") from None
        if pair:
            comparison.runs.append(done)


def _in_words(figures: dict[str, float]) -> str:
    units = {ratios.CPU: " µs"} | dict.fromkeys(ratios.LATENCIES, " ms")
    return ", ".join(f"{ratios.label(name)} {value:,.6g}{units.get(name, '')}" for name, value in figures.items())


def run_bench(words: Sequence[str], tree: Path, seconds: float) -> dict[str, Any]:
    """Run a bench that prints JSON; interrupt it after so many seconds. Raises RunFailed, Lost."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a shell ignores SIGINT, and its children would, too; but the bench must be interruptible.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        words,
        cwd=tree,
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException as reason:
        _end(process)
        if isinstance(reason, subprocess.TimeoutExpired):
            raise RunFailed(f"it was not done after {seconds:g} s") from None
        raise
    result = _result(output)
    if result is None or (process.returncode and not _wrong(result)):
        print((errors or output)[-LAST_WORDS:], file=sys.stderr)
        raise RunFailed(f"it failed with exit code {process.returncode}; its last words are above")
    if _wrong(result):
        raise Lost(f"it lost {result.get('lost')} and doubled {result.get('duplicated')}")
    return result


def _wrong(result: dict[str, Any]) -> bool:
    return bool(result.get("lost") or result.get("duplicated"))


def _result(output: str) -> dict[str, Any] | None:
    try:
        result = json.loads(output)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupted, a bench stops its server, which has a session of its own; its other processes share this one."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=STOP_SECONDS)
    except ProcessLookupError:
        process.communicate(timeout=STOP_SECONDS)


@contextmanager
def _alone() -> Iterator[None]:
    """Allow one comparison at a time, as two would disturb each other. Raises NotComparable."""
    checkout.ROOM.mkdir(exist_ok=True)
    with (checkout.ROOM / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotComparable("another comparison is running") from None
        yield


def compare(given: argparse.Namespace, tell: Callable[[str], None]) -> tuple[Comparison, Verdict]:
    """Set up, measure, judge. Raises NotComparable if nothing could be measured."""
    commit = checkout.commit_of(given.base)
    with _alone():
        sides: dict[str, Checkout] = {BASE: checkout.committed(commit, tell), HEAD: checkout.working_tree()}
        for side in sides.values():
            side.check()
        comparison = Comparison(commit, sides[HEAD].commit, given.bench, given.pairs)
        tell(f"base {comparison.base}\nhead {comparison.head}\nnotify bench {comparison.bench}")

        sources = {name: side.sources() for name, side in sides.items()}

        def run(name: str) -> dict[str, Any]:
            words = ["-m", "notify.cli.main", "bench", *shlex.split(given.bench), "--json"]
            result = run_bench([str(sides[name].python), *words], sides[name].tree, given.run_seconds)
            if changed := sources[name] ^ sides[name].sources():
                raise RunFailed(f"{min(changed)[0]} changed while it was measured")
            return result

        try:
            measure(comparison, run, tell)
        except RunFailed as error:
            return comparison, Verdict(error.word, str(error))
        return comparison, ratios.judge(comparison.spreads(), given.rate_at_least, given.cpu_at_most)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="a revision to compare the working tree with")
    parser.add_argument("--bench", default="transactions --clients 128", help="the words after `notify bench`")
    parser.add_argument("--pairs", type=_odd, default=9, help="pairs of runs that count, an odd number")
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS, help="the longest that a run may take")
    parser.add_argument("--rate-at-least", type=float, help="the least median ratio of the rates")
    parser.add_argument("--cpu-at-most", type=float, help="the greatest median ratio of CPU time a transaction")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    given = parser.parse_args(words)

    def tell(line: str) -> None:
        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)

    try:
        comparison, verdict = compare(given, tell)
    except NotComparable as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if comparison.spreads():
        tell(comparison.table())
    if given.json:
        print(json.dumps(comparison.as_json(verdict)))
    tell(f"VERDICT: {verdict}")
    return verdict.exit_code


def _odd(text: str) -> int:
    if not text.isdecimal() or int(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text} is no odd number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
