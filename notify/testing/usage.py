"""The CPU time and the memory of a process, as the kernel counts them (Linux)."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """The user and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The child processes of a process's main thread whose end it has not waited for yet."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def anonymous_bytes(pid: int) -> int:
    """The memory of a process without mapped files (RssAnon); 0 once the process has ended."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


def resident_mb(root: int) -> float:
    """The resident memory of a process and all its descendants, in MiB."""
    return sum(resident_by_program(root).values())


def resident_by_program(root: int) -> dict[str, float]:
    """Like `resident_mb`, by the name of the program (its first 15 characters)."""
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    names: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
            pid = int(stat.parent.name)
            pages[pid] = int((stat.parent / "statm").read_text().split()[1])
        except (OSError, ValueError):
            continue  # the process has ended
        names[pid] = before.partition("(")[2]
        children.setdefault(int(after.split()[1]), []).append(pid)
    resident: dict[str, float] = {}
    wanted = [root]
    while wanted:
        pid = wanted.pop()
        if pid in pages:
            megabytes = pages[pid] * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
            resident[names[pid]] = resident.get(names[pid], 0) + megabytes
        wanted += children.get(pid, ())
    return resident
