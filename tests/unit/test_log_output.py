"""Lines of a log that nobody can take: the one who logs continues."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

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
