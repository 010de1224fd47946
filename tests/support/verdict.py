"""The last line of a campaign is its verdict, whatever ends it."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import traceback
from collections.abc import Callable, Collection
from random import SystemRandom
from typing import Any

from notify.runtime.signals import SIGNALS, exit_on_signal

END_SECONDS = 300.0
"""How long a campaign whose time is over may take to end its processes."""
INCONCLUSIVE = 2
_TOLD = {128 + number: f"it was ended by {number.name}" for number in (*SIGNALS, signal.SIGHUP)}


def judged(campaign: Callable[[], int], most_seconds: float = float("inf"), end_seconds: float = END_SECONDS) -> int:
    """Run a campaign, which prints a verdict and returns its exit code.

    If an exception or a signal ends it first, or it takes longer than `most_seconds`, the verdict is INCONCLUSIVE with
    the reason, and the exit code 2. Use it in the main thread.
    """
    overdue = _Overdue(most_seconds, end_seconds)
    try:
        with exit_on_signal(), overdue:
            return campaign()
    except SystemExit as ended:
        if overdue.reason or ended.code in _TOLD:
            return _inconclusive(overdue.reason or _TOLD[int(ended.code or 0)])
        raise  # of wrong arguments
    except KeyboardInterrupt:
        return _inconclusive("it was interrupted")
    except BaseException as failure:
        traceback.print_exc()
        text = " ".join(str(failure).split())[:500]
        return _inconclusive(f"the campaign itself failed: {type(failure).__name__}: {text}")
    finally:
        overdue.end()  # also if its own signal came before it was entered


def command_line(about: str | None, **flags: Any) -> argparse.Namespace:
    """Read the command line of a campaign, by the defaults of its flags.

    False is a switch; a tuple has what can be chosen, the first by default; a seed of None is random, and printed.
    """
    parser = argparse.ArgumentParser(description=about)
    for name, default in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        else:
            parser.add_argument(flag, type=int if default is None else type(default), default=default)
    said = parser.parse_args()
    if flags.get("seed", 1) is None:
        said.seed = SystemRandom().randrange(1 << 30) if said.seed is None else said.seed
        print(f"seed {said.seed}", flush=True)
    return said


def concluded(wrong: Collection[str], words: str) -> int:
    """Print what was wrong, and the verdict with these words; its exit code."""
    for text in wrong:
        print(text)
    print(f"VERDICT: {'FAIL' if wrong else 'PASS'} {words}", flush=True)
    return 1 if wrong else 0


def asserted(campaign: Callable[[], str]) -> int:
    """Run a campaign that returns its figures, and raises AssertionError with them if a promise was broken.

    Prints the verdict; returns its exit code.
    """
    try:
        words = campaign()
    except AssertionError as broken:
        print(f"VERDICT: FAIL {broken}", flush=True)
        return 1
    print(f"VERDICT: PASS {words}", flush=True)
    return 0


def _inconclusive(reason: str) -> int:
    print(f"VERDICT: INCONCLUSIVE {reason}", flush=True)
    return INCONCLUSIVE


class _Overdue:
    """Ends this process once its time is over: by SIGTERM, and if that does not suffice, with the verdict alone."""

    def __init__(self, most_seconds: float, end_seconds: float) -> None:
        self._most_seconds, self._end_seconds = most_seconds, end_seconds
        self._over = threading.Event()
        self.reason = ""

    def __enter__(self) -> None:
        if self._most_seconds < float("inf"):
            threading.Thread(target=self._run, name="overdue", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        if self._over.wait(self._most_seconds):
            return
        self.reason = f"it has not ended within {self._most_seconds / 60:.0f} minutes"
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(self._end_seconds):
            os._exit(_inconclusive(f"{self.reason}, and does not end its processes"))
