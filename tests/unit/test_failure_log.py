"""A consumer logs each failure in a line, and the traceback of one cause once a minute."""

from __future__ import annotations

import logging

import pytest

from notify.client.handling import failure_log
from notify.client.handling.failure_log import TRACE_SECONDS, FailureLog
from notify.errors import DeadLetter


def raised(kind: type[Exception], text: str) -> Exception:
    try:
        raise kind(text)
    except Exception as error:
        return error


def test_a_cause_is_traced_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 1_000.0
    failures = FailureLog(lambda: now)
    with caplog.at_level(logging.WARNING, "notify.consumer"):
        for attempt in (1, 2, 3):
            failures.tell("order.placed", "m.0", attempt, raised(OSError, f"refused {attempt}"))
        failures.tell("order.placed", "m.0", 4, raised(ValueError, "refused"))
        now += TRACE_SECONDS
        failures.tell("order.placed", "m.0", 5, raised(OSError, "refused 5"))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False, True, True]
    assert "failed on m.0 (attempt 2): OSError: refused 2 (at tests.unit.test_failure_log" in caplog.messages[1]


def test_a_text_that_looks_like_a_line_of_the_log_is_a_part_of_one(caplog: pytest.LogCaptureFixture) -> None:
    """A handler's error often quotes the message: other people's text wrote lines, and moved the cursor."""
    with caplog.at_level(logging.WARNING, "notify.consumer"):
        FailureLog().tell("t", "m.0", 1, ValueError("no item 'x'\nERROR all is lost\x1b[2J\u202e"))
    assert "no item 'x'\\nERROR all is lost\\x1b[2J\\u202e" in caplog.messages[0]


def test_the_causes_it_knows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_log, "MOST_CAUSES", 2)
    failures = FailureLog()
    for kind in (OSError, ValueError, KeyError):
        failures.tell("t", "m.0", 1, raised(kind, "x"))
    assert len(failures._traced) == 1


def test_a_message_that_is_given_up_is_a_line_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A handler raised DeadLetter, and the consumer's log had no word of it."""
    with caplog.at_level(logging.WARNING, "notify.consumer"):
        FailureLog().tell("order.placed", "m.0", 1, raised(DeadLetter, "the order has no item"))
    assert caplog.messages == ["handler of order.placed gave up m.0, now a dead letter: the order has no item"]
    assert not caplog.records[0].exc_info
