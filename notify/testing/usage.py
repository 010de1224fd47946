"""The CPU time and the memory of a process, as the kernel counts them (Linux)."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """The user and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: its own memory, without the files that it maps. 0 once it has ended."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


def resident_mb(root: int) -> float:
    """Resident memory of a process and all its descendants, in MiB."""
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            pages[pid] = int((stat.parent / "statm").read_text().split()[1])
            children.setdefault(int(fields[1]), []).append(pid)
        except (OSError, ValueError):
            continue  # the process has ended
    total, wanted = 0, [root]
    while wanted:
        pid = wanted.pop()
        total += pages.get(pid, 0)
        wanted += children.get(pid, ())
    return total * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
