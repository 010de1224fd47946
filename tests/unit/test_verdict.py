"""Whatever ends a campaign, its last line is a verdict."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from tests.support.clock import PATIENCE_SECONDS
from tests.support.verdict import judged


def waits() -> int:
    threading.Event().wait(PATIENCE_SECONDS)
    return 0


def fails() -> NoReturn:
    raise AssertionError("waited 60 s for\nthe server")


def is_told() -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return waits()


def is_interrupted() -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("campaign", "most_seconds", "reason"),
    [
        (fails, PATIENCE_SECONDS, "the campaign itself failed: AssertionError: waited 60 s for the server"),
        (is_told, PATIENCE_SECONDS, "it was ended by SIGTERM"),
        (is_interrupted, PATIENCE_SECONDS, "it was interrupted"),
        (waits, 0.0, "it has not ended within 0 minutes"),
    ],
)
def test_a_campaign_without_a_verdict_of_its_own_says_why(
    campaign: Callable[[], int], most_seconds: float, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(campaign, most_seconds) == 2
    assert capsys.readouterr().out == f"VERDICT: INCONCLUSIVE {reason}\n"


def test_a_campaign_that_has_a_verdict_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(lambda: 1, PATIENCE_SECONDS) == 1
    assert capsys.readouterr().out == ""


def test_wrong_arguments_are_no_verdict() -> None:
    def refuses() -> NoReturn:
        raise SystemExit(2)

    with pytest.raises(SystemExit):
        judged(refuses)
