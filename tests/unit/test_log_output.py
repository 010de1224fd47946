"""Lines of a log: one that nobody can take stops nobody, and a failure has one line and seldom a traceback."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from notify.client.handling import failure_log
from notify.client.handling.failure_log import TRACE_SECONDS, FailureLog
from notify.errors import DeadLetter
from notify.runtime import log_output
from notify.runtime.log_output import LogOutput
from tests.support.clock import PATIENCE_SECONDS


def log(line: str) -> None:
    """As structlog's logger does."""
    print(line, file=LogOutput("stdout"), flush=True)


def test_a_log_on_a_full_disk_goes_on_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - its end fails, too
    monkeypatch.setattr(sys, "stdout", full)
    log("lost")
    with open(tmp_path / "log", "w") as roomy:
        os.dup2(roomy.fileno(), full.fileno())
    log("there")
    full.close()
    assert (tmp_path / "log").read_text().endswith("there\n")


def test_a_log_that_nobody_reads_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        log("lost")
        assert os.readlink(f"/proc/self/fd/{writing}") == os.devnull
        log("lost, too")


def test_a_log_whose_reader_does_not_read_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of the workers stood still once the pipe was full, and nobody watched over them any more."""
    monkeypatch.setattr(log_output, "WAIT_SECONDS", 0.01)
    reading, writing = os.pipe()
    output = LogOutput("stdout")

    def lines() -> None:
        for number in range(2_000):
            print(number, "x" * 900, file=output, flush=True)

    with open(writing, "w") as held:
        monkeypatch.setattr(sys, "stdout", held)
        logging = threading.Thread(target=lines, daemon=True)
        logging.start()
        logging.join(PATIENCE_SECONDS)
        assert not logging.is_alive(), "it waits for a reader"
        kept = os.read(reading, 1 << 20).count(b"x\n")
        print("there", file=output, flush=True)
        *_, told, last = os.read(reading, 1 << 20).decode().splitlines()
    os.close(reading)
    assert (told, last) == (f"{2_000 - kept} lines of this log are lost because the output was not read", "there")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_process_without_an_output_logs_to_nobody(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    log("lost")


# --- A consumer logs each failure in a line, and the traceback of one cause once a minute ---------------------------


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
            failures.record("order.placed", "m.0", attempt, raised(OSError, f"refused {attempt}"))
        failures.record("order.placed", "m.0", 4, raised(ValueError, "refused"))
        now += TRACE_SECONDS
        failures.record("order.placed", "m.0", 5, raised(OSError, "refused 5"))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False, True, True]
    assert "failed on m.0 (attempt 2): OSError: refused 2 (at tests.unit.test_log_output" in caplog.messages[1]


def test_a_text_that_looks_like_a_line_of_the_log_is_a_part_of_one(caplog: pytest.LogCaptureFixture) -> None:
    """A handler's error often quotes the message: other people's text wrote lines, and moved the cursor."""
    with caplog.at_level(logging.WARNING, "notify.consumer"):
        FailureLog().record("t", "m.0", 1, ValueError("no item 'x'\nERROR all is lost\x1b[2J\u202e"))
    assert "no item 'x'\\nERROR all is lost\\x1b[2J\\u202e" in caplog.messages[0]


def test_the_causes_it_knows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_log, "MOST_CAUSES", 2)
    failures = FailureLog()
    for kind in (OSError, ValueError, KeyError):
        failures.record("t", "m.0", 1, raised(kind, "x"))
    assert len(failures._traced) == 1


def test_a_message_that_is_given_up_is_a_line_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A handler raised DeadLetter, and the consumer's log had no word of it."""
    with caplog.at_level(logging.WARNING, "notify.consumer"):
        FailureLog().record("order.placed", "m.0", 1, raised(DeadLetter, "the order has no item"))
    assert caplog.messages == ["handler of order.placed gave up m.0, now a dead letter: the order has no item"]
    assert not caplog.records[0].exc_info
