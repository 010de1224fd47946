"""Lines of a log that nobody can take: the one who logs goes on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from notify.log_output import LogOutput


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


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_process_without_an_output_logs_to_nobody(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    log("lost")
