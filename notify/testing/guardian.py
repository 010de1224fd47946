"""Ends a suite's processes once the suite has ended: by Ctrl-C once or twice, `timeout`, a closed terminal, kill -9.

A suite that is killed ends nothing itself, and one that is interrupted twice ends only a part. So a process of its own,
the guardian, outlives the suite: it waits for the end of a pipe that only the suite holds open, and then kills every
process that inherited the suite's mark in its environment. A signal at a parent's death (PR_SET_PDEATHSIG) is not
enough: it is sent when the *thread* that started the process ends. Linux only; elsewhere nothing is guarded.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "NOTIFY_TEST_SUITE"
"""The environment variable that marks a suite's processes: the directory in which some register."""
KILL_SECONDS = 60.0
"""How long the guardian looks for processes that do not end: one may wait for a disk."""


class Guardian:
    """The guardian of this process and of all that it starts from now on."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="notify-suite-")
        os.chmod(self._directory, 0o777)
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        # In a session of its own no terminal and no signal to the suite's group reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._directory],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=unmarked, cwd="/", start_new_session=True,
        )  # fmt: skip
        os.environ[MARK] = self._directory

    def end(self) -> None:
        """End all processes that the suite left, and wait until they have ended."""
        os.environ.pop(MARK, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def register(pid: int) -> None:
    """Let the guardian, if there is one, also end this process, even if it may not read the process's environment.

    Every database server is registered right after its start: it may run as another user.
    """
    directory = os.environ.get(MARK)
    if directory and (born := _born(pid)):
        Path(directory, str(pid)).write_text(born)


def _born(pid: int) -> str:
    """When a process was started, in ticks; empty if it has ended. Another process may get its id later."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def _left(directory: str) -> Iterator[int]:
    """The running processes of a suite."""
    marked = f"{MARK}={directory}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = marked in (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if is_marked and _born(int(place.name)):
            yield int(place.name)
    for registered in Path(directory).iterdir():
        if _born(int(registered.name)) == registered.read_text():
            yield int(registered.name)


def _kill(directory: str) -> None:
    """Kill a suite's processes, and those that they start meanwhile."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := list(_left(directory))) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
        time.sleep(0.02)  # the pause between two looks
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the suite has ended
    _kill(sys.argv[1])
