"""A watch beside a running shop reports lost messages in time, and kills and stalls lose and double no report.

Run as `python -m tests.audit.watching --windows 36`. First a watch over made-up audits dies at each of its named points
(killed_watch.py). Then a shop places 40 orders a second, and the watch is killed at random instants. Every finding is
in the file once, and its alarm is taken: twice only where the watch died before it could note that. The watch's memory
is sampled, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from notify.testing.databases import postgresql
from notify.testing.process import ServerProcess
from notify.testing.usage import resident_mb
from tests.audit import killed_watch
from tests.audit.shop import Shop
from tests.support.clock import eventually
from tests.support.receiver import Receiver

WINDOW = 10.0
LONGEST_SECONDS = 600
"""The longest wait for the watch's next line, on the slowest machine."""


class Watching:
    """`notify audit watch` as a process, and its lines so far."""

    def __init__(self, url: str, server: ServerProcess, state: Path, *flags: str) -> None:
        self._command = [
            sys.executable, "-m", "notify.cli.main", "audit", "watch", "--json", "--database", f"shop={url}",
            "--log", str(server.data_dir), "--window-seconds", str(WINDOW), "--max-transaction-seconds", "2",
            "--deliver-seconds", "2", "--state", str(state), "--memory", "1g", *flags,
        ]  # fmt: skip
        self.state = state
        self.lines: list[tuple[float, dict[str, Any]]] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Watching:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.time(), json.loads(line)))

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)  # its JVM too
        else:
            self.process.send_signal(number)
        code = self.process.wait(60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def lines_of(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [line for line in self.lines if line[1]["kind"] == kind]

    def wait_for(self, windows: int) -> None:
        """Wait until so many windows are audited; fails if the watch ends."""

        def audited() -> bool:
            assert self.process is not None and self.process.stderr is not None
            assert self.process.poll() is None, self.process.stderr.read()
            return self.windows() >= windows

        eventually(audited, f"{windows} windows", LONGEST_SECONDS)

    def windows(self) -> int:
        return len({line["window_us"] for _, line in self.lines_of("window")})


def watch(
    shop: Shop, watching: Watching, server: ServerProcess, receiver: Receiver, windows: int, kills: int
) -> list[str]:
    """Lose a message in every fourth window, kill the watch several times and the server once; return complaints."""
    watching.start()
    watching.wait_for(1)
    chance = random.Random(7)
    lost: dict[str, float] = {}
    memory: list[float] = []
    kill_at = set(chance.sample(range(5, windows - 5), kills))
    stall_at = windows // 2
    seen = 0
    complaints: list[str] = []
    while (at := watching.windows()) < windows:
        if at > seen:
            seen = at
            assert watching.process is not None
            memory.append(resident_mb(watching.process.pid))
            print(f"window {at}: {memory[-1]:.0f} MB, {len(watching.lines_of('finding'))} findings", flush=True)
            if at % 4 == 0 and at < windows - 4:
                lost[shop.lose()] = time.time()
            if at in kill_at:
                time.sleep(chance.uniform(0, WINDOW))  # anywhere in a window
                watching.kill()
                watching.start()
            if at == stall_at:
                server.kill()
                time.sleep(2 * WINDOW)  # windows in which the log does not grow
                server.start()
        watching.wait_for(at + 1)
    if watching.kill(signal.SIGTERM) != 0:
        complaints.append("the watch did not end with 0")
    lines = [json.loads(line) for line in (watching.state / "findings.jsonl").read_text().splitlines()]
    said = Counter(line["message_id"] for line in lines if line["kind"] == "finding" and line["finding"] == "LOST")
    if said != Counter(lost.keys()):
        complaints.append(f"planted {len(lost)}, said {len(said)}, most often {said.most_common(1)}")
    alarmed = Counter(key for key in receiver.alarm_keys() if key.startswith("LOST:"))
    twice = sum(alarmed.values()) - len(alarmed)
    if {key.split(":")[1] for key in alarmed} != set(lost) or twice > kills:
        complaints.append(f"planted {len(lost)}, alarmed {len(alarmed)}, {twice} of them again")
    others = Counter(line["finding"] for line in lines if line["kind"] == "finding") - Counter(LOST=len(lost))
    # While the server is away, groups cannot settle; no other finding is allowed.
    if set(others) - {"UNDELIVERED"}:
        complaints.append(f"findings that were not planted: {dict(others)}")
    late = []
    for moment, line in watching.lines_of("finding"):
        planted = lost.get(line["message_id"])
        if planted is not None and line["finding"] == "LOST":
            late.append((moment - planted) / WINDOW)
    print(f"LOST was reported {min(late):.1f} to {max(late):.1f} windows after it was planted")
    windows_us = sorted({line["window_us"] for _, line in watching.lines_of("window")})
    # The line of a window is only printed: a watch that dies behind its commit does not print it.
    left_out = set(range(windows_us[0], windows_us[-1] + 1, round(WINDOW * 1e6))) - set(windows_us)
    if len(left_out) > kills:
        complaints.append(f"{len(left_out)} windows were left out")
    print(f"memory: {memory[2]:.0f} MB at the third window, {memory[-1]:.0f} MB at the last")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=36)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    complaints = killed_watch.complaints()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notify-watch-")))
        url = stack.enter_context(postgresql())
        server = ServerProcess(directory / "data").start()
        stack.callback(server.stop)
        receiver = stack.enter_context(closing(Receiver()))
        watching = Watching(url, server, directory / "state", "--alarm-url", receiver.url)
        shop = stack.enter_context(closing(Shop(url, server.url)))
        with shop.busy(pause_seconds=0.02):
            try:
                complaints += watch(shop, watching, server, receiver, given.windows, given.kills)
            finally:
                if watching.process is not None and watching.process.poll() is None:
                    watching.kill()
    for complaint in complaints:
        print(complaint)
    print(
        f"VERDICT: {'FAIL' if complaints else 'PASS'} {given.windows} windows, {given.kills} kills, one stalled server"
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
