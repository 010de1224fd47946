"""Repairs that are killed at random points: whatever they leave, going on with the plan makes no effect happen twice.

No Spark is needed: a plan that stands in a file is carried out. `python -m tests.audit.killed_repair DATABASE LOG URL`
carries out the plan that each line of its input names, in a process of its own that its parent can kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from notify.spark.databases import Database
from notify.spark.log_input import LogInput
from notify.spark.repair.carrying_out import Repair
from notify.spark.repair.plan import read_plan
from notify.spark.result import Inputs


def carry_out(database_url: str, log: str, url: str, path: Path) -> None:
    """Carry out a plan as `notify audit run --repair` does."""
    with contextlib.closing(Database(database_url, "shop")) as database:
        inputs = Inputs([database], [LogInput(Path(log))])
        repair = Repair(inputs, url, "a test", path.parent / f"scratch-{os.getpid()}")
        asyncio.run(repair.run(read_plan(path), path))


class Repairs:
    """Carries out plans in processes that it kills. Close it at the end."""

    def __init__(self, database_url: str, log: Path, url: str, seed: int = 1) -> None:
        words = [sys.executable, "-m", "tests.audit.killed_repair", database_url, str(log), url]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._chance = random.Random(seed)
        self.killed = 0

    def __enter__(self) -> Repairs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, plan: Path, within_seconds: float = 0.0) -> float:
        """Carry the plan out once, and kill that at a random instant within so many seconds (0: never); how long it
        took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        began = time.monotonic()
        self._process.stdin.write(f"{plan}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if within_seconds:
            ended, _, _ = select.select([self._process.stdout], [], [], self._chance.uniform(0, within_seconds))
            if not ended:
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
        status = int(self._process.stdout.readline())
        assert status in ({0, -signal.SIGKILL} if within_seconds else {0}), f"a repair ended with {status}"
        return time.monotonic() - began


def _plans() -> Iterator[Path]:
    for line in sys.stdin:
        yield Path(line.strip())


def main(database_url: str, log: str, url: str) -> None:
    for path in _plans():
        pid = os.fork()
        if not pid:
            carry_out(database_url, log, url, path)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
