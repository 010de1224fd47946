"""The machine that a comparison ran on, and how long its disk takes to sync."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Any

SYNCS = 200
BLOCK = 4096
IN_MEMORY = ("tmpfs", "ramfs")


def described(directory: Path) -> dict[str, Any]:
    """The machine and the file system of a directory, for people who compare figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(directory),
    }


def _cpu() -> str:
    name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return name[1] if name else platform.machine()


def file_system(directory: Path) -> str:
    """The type of the file system that a directory is on, such as ext4."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    place = directory.resolve()
    around = [(mount[1], mount[2]) for mount in mounts if place.is_relative_to(mount[1])]
    return max(around, key=lambda mount: len(mount[0]))[1]


def fdatasync_ms(directory: Path) -> float:
    """The median time of an append of 4 KiB and its fdatasync."""
    times = []
    with (directory / "sync").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            started = time.perf_counter()
            file.write(bytes(BLOCK))
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)
