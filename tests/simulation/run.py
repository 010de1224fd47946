"""`make simulate SEEDS=20000`: as many seeds as asked for; a seed that fails can be run again alone."""

from __future__ import annotations

import sys
import time

import structlog

from tests.simulation.world import World
from tests.support.verdict import command_line, judged
from tests.support.virtual_loop import run


def simulate(seed: int, *, naive: bool = False, unordered: bool = False) -> list[str]:
    """The violations of one seed."""

    async def whole() -> list[str]:
        return await World(seed, naive=naive, unordered=unordered).run()

    violations: list[str] = run(whole())
    return violations


def main() -> int:
    options = command_line(__doc__, seeds=20_000, first=0)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    started = time.monotonic()
    bad = 0
    for seed in range(options.first, options.first + options.seeds):
        for violation in simulate(seed):
            bad += 1
            print(f"seed {seed}: {violation}", flush=True)
    rate = options.seeds / (time.monotonic() - started) * 60
    verdict = "FAIL" if bad else "PASS"
    print(f"VERDICT: {verdict} {options.seeds} seeds, {bad} violations, {rate:.0f} seeds a minute")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(judged(main))
