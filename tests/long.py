"""`make test-long`: every test, the long ones too, then each campaign in a form of a few minutes.

A campaign that fails does not keep the next from running; the last line says which failed. Each has a bound in time,
behind which it is stopped and has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from notify.testing.guardian import Guardian


@dataclass(frozen=True, slots=True)
class Step:
    """A command with the interpreter that runs this, and the minutes it may take."""

    name: str
    arguments: tuple[str, ...]
    minutes: float


END_SECONDS = 120.0

BRIDGE = ("-m", "tests.crash.bridge", "--kills", "15", "--rotations", "4")
MOVERS = ("-m", "tests.history.run", "--over-databases", "--database", "mysql", "--seconds", "60")
AUTO = ("-m", "tests.crash.auto", "--seconds", "40")
AUDIT = ("-m", "tests.audit.campaign", "--transactions", "100000", "--each", "25")
STEPS = (
    Step("every test", ("-m", "pytest", "-m", "", "-n", "{workers}"), 90),
    Step("kill -9, lost power, flipped bits", ("-m", "tests.crash.campaign", "--cycles", "40"), 10),
    Step("the demo on MySQL", ("-m", "tests.cluster_demo", "--database", "mysql"), 6),
    Step("races", ("-m", "tests.simulation.run", "--seeds", "6000"), 10),
    Step("a bridge killed, MariaDB", (*BRIDGE, "--database", "mariadb"), 10),
    Step("a bridge killed, MySQL", (*BRIDGE, "--database", "mysql"), 12),
    Step("servers killed, MariaDB", ("-m", "tests.crash.cluster", "--database", "mariadb", "--seconds", "40"), 8),
    Step("servers killed, MySQL", ("-m", "tests.crash.cluster", "--database", "mysql", "--seconds", "40"), 8),
    Step("servers killed, PostgreSQL", ("-m", "tests.crash.cluster", "--database", "postgresql", "--seconds", "40"), 8),
    Step("a history over PostgreSQL and MySQL", MOVERS, 10),
    Step("a history over Kafka", ("-m", "tests.history.run", "--over-kafka", "--seconds", "180"), 20),
    Step("mode auto and a relay, PostgreSQL", (*AUTO, "--database", "postgresql", "--mover", "relay"), 8),
    Step("mode auto and a bridge, MySQL", (*AUTO, "--database", "mysql", "--mover", "bridge"), 8),
    Step("fuzzed routes", ("-m", "tests.fuzz", "--cases", "4000"), 10),
    Step("planted faults", AUDIT, 12),
    Step("planted faults, MySQL", (*AUDIT, "--database", "mysql", "--disasters", "0"), 6),
)


def run(step: Step, workers: str) -> bool:
    """Whether the step passed."""
    arguments = [argument.format(workers=workers) for argument in step.arguments]
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True)
    try:
        return process.wait(step.minutes * 60) == 0
    except subprocess.TimeoutExpired:
        print(f"{step.name}: stopped after {step.minutes:g} minutes", flush=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a campaign ends its processes, and says what it was at
            process.wait(END_SECONDS)
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="4", help="of the first step")
    workers = parser.parse_args().workers
    guardian = Guardian()
    try:
        return run_all(workers)
    finally:
        guardian.end()


def run_all(workers: str) -> int:
    """Run every step; the exit code."""
    failed = []
    began = time.monotonic()
    for step in STEPS:
        print(f"== {step.name}", flush=True)
        step_began = time.monotonic()
        if not run(step, workers):
            failed.append(step.name)
        print(f"== {step.name}: {time.monotonic() - step_began:.0f} s", flush=True)
    minutes = (time.monotonic() - began) / 60
    if failed:
        print(f"VERDICT: FAIL {', '.join(failed)}, in {minutes:.0f} minutes")
        return 1
    print(f"VERDICT: PASS {len(STEPS)} steps in {minutes:.0f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
