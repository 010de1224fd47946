"""A program that starts servers ends them when it is told to end: `timeout`, a cancelled CI job, a closed terminal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from notify.testing import usage
from tests.support.clock import PATIENCE_SECONDS, eventually
from tests.support.verdict import INCONCLUSIVE

BENCH = ("notify.cli.main", "bench", "transactions", "--clients", "1", "--seconds", "3600")
DEMO = ("notify.cli.main", "demo", "--seconds", "600")
FUZZ = ("tests.fuzz", "--cases", "1000000")


def has_a_server(pid: int) -> bool:
    """Whether a child of a process is `notify serve`, and has made its data directory."""
    for child in usage.children(pid):
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "serve" in words and Path(words[words.index("--data-dir") + 1]).exists():
            return True
    return False


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "number"),
    [
        (BENCH, signal.SIGHUP),
        (DEMO, signal.SIGTERM),
        (FUZZ, signal.SIGTERM),
        pytest.param(BENCH, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(DEMO, signal.SIGHUP, marks=pytest.mark.long),
        pytest.param(FUZZ, signal.SIGHUP, marks=pytest.mark.long),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value[1] if "cli" in value[0] else value[0],
)
def test_a_program_that_is_told_to_end_leaves_nothing_running(words: tuple[str, ...], number: signal.Signals) -> None:
    def heeds_it() -> None:
        signal.signal(number, signal.SIG_DFL)  # under nohup a child ignores SIGHUP

    with subprocess.Popen(
        [sys.executable, "-m", *words], preexec_fn=heeds_it, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as told:
        try:
            eventually(lambda: has_a_server(told.pid), "its server")
            started = usage.children(told.pid)
            told.send_signal(number)
            # A campaign says INCONCLUSIVE, whatever ends it.
            assert told.wait(PATIENCE_SECONDS) == (INCONCLUSIVE if words[0].startswith("tests.") else 128 + number)
        finally:
            told.terminate()
    eventually(lambda: not any(map(is_there, started)), "the end of what it started")
