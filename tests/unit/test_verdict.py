"""Whatever ends a campaign, its last line is a verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.clock import PATIENCE_SECONDS
from tests.support.verdict import asserted, judged

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, threading
from tests.support.verdict import judged

def waits():
    threading.Event().wait({patience})
    return 0

def fails():
    raise AssertionError("waited 60 s for\\nthe server")

def is_told():
    os.kill(os.getpid(), signal.SIGTERM)
    return waits()

def is_interrupted():
    raise KeyboardInterrupt

sys.exit(judged({campaign}, {seconds}))
"""


@pytest.mark.parametrize(
    ("campaign", "seconds", "reason"),
    [
        ("fails", PATIENCE_SECONDS, "the campaign itself failed: AssertionError: waited 60 s for the server"),
        ("is_told", PATIENCE_SECONDS, "it was ended by SIGTERM"),
        ("is_interrupted", PATIENCE_SECONDS, "it was interrupted"),
        ("waits", 0.0, "it has not ended within 0 minutes"),
    ],
)
def test_a_campaign_without_a_verdict_of_its_own_says_why(campaign: str, seconds: float, reason: str) -> None:
    """In a process of its own, since it gets signals."""
    program = PROGRAM.format(campaign=campaign, seconds=seconds, patience=PATIENCE_SECONDS)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (2, f"VERDICT: INCONCLUSIVE {reason}\n"), done.stderr


def test_a_campaign_that_has_a_verdict_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(lambda: 1, PATIENCE_SECONDS) == 1
    assert capsys.readouterr().out == ""


def test_wrong_arguments_are_no_verdict() -> None:
    def refuses() -> NoReturn:
        raise SystemExit(2)

    with pytest.raises(SystemExit):
        judged(refuses)


def test_a_campaign_that_asserts_its_promises_fails_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> str:
        raise AssertionError("2 lost")

    assert (asserted(breaks), asserted(lambda: "0 lost")) == (1, 0)
    assert capsys.readouterr().out == "VERDICT: FAIL 2 lost\nVERDICT: PASS 0 lost\n"
