"""`make compare BASE=<revision>`: the working tree beside a commit, as ratios of a bench run by turns.

Each side runs its own code in its own environment (checkout.py). The exit code is 0 for PASS, 1 for FAIL, and 2 for
INCONCLUSIVE.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from notify.runtime.signals import exit_on_signal
from tools.bench.compare import checkout, ratios
from tools.bench.compare.bench_run import RunFailed, run_bench
from tools.bench.compare.checkout import Checkout, NotComparable
from tools.bench.compare.comparison import BASE, HEAD, Comparison, measure
from tools.bench.compare.ratios import Verdict

RUN_SECONDS = 900.0


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
        tell(f"base {comparison.base}\nhead {comparison.head}\nbench {comparison.bench}")

        sources = {name: side.sources() for name, side in sides.items()}

        def run(name: str) -> dict[str, Any]:
            side = sides[name]
            result = run_bench(side.bench(given.bench), side.tree, given.run_seconds)
            if changed := sources[name] ^ side.sources():
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
    parser.add_argument("--bench", default="transactions --clients 128", help="the words after `python -m tools.bench`")
    parser.add_argument("--pairs", type=_odd, default=9, help="pairs of runs that count, an odd number")
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS, help="the longest that a run may take")
    parser.add_argument("--rate-at-least", type=float, help="the least median ratio of the rates")
    parser.add_argument(
        "--cpu-at-most",
        type=float,
        help="the greatest median ratio of CPU time a transaction, of the server and of the client",
    )
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
    with exit_on_signal():
        sys.exit(main())
