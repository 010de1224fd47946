"""Samples the process that it is imported into. Python imports a module of this name at its start, from PYTHONPATH.

Each millisecond of CPU time, Python's and the kernel's on behalf of the process, counts for the Python function that
runs when the signal is handled. The time of a call into C, or of a system call, counts for the function that called.
Nothing of the project is imported here, since the tree that is measured may be older than this file.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

INTERVAL_SECONDS = 0.001
ROLES = {" serve ": "server", "notify.bench.load": "client"}
"""The processes that are sampled, by a word of their command."""


class Sampler:
    """Counts from one alarm to the next, then writes one JSON object: samples by file and function."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._seconds = seconds
        self._counts: Counter[str] = Counter()
        self._is_on = False

    def start_after(self, seconds: float) -> None:
        signal.signal(signal.SIGALRM, self._turn)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _turn(self, number: int, frame: FrameType | None) -> None:
        if self._is_on:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._file.write_text(json.dumps(self._counts))
            return
        self._is_on = True
        signal.signal(signal.SIGPROF, self._count)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_SECONDS, INTERVAL_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self._counts[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1


def _sample_this_process() -> None:
    directory = os.environ.get("PROFILED_TO")
    if directory is None:
        return
    command = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    for word, role in ROLES.items():
        if word in command:
            after, seconds = map(float, os.environ["PROFILED_SECONDS"].split())
            Sampler(Path(directory) / role, seconds).start_after(after)


_sample_this_process()
