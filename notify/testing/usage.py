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
    resident: dict[str, float] = {}
    for pid, name in tree(root).items():
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            continue  # the process has ended
        resident[name] = resident.get(name, 0) + pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return resident


def tree(root: int) -> dict[int, str]:
    """A process and all its running descendants: by id, the name of the program (its first 15 characters)."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except OSError:
            continue  # the process has ended
        state, parent = after.split()[:2]
        if state not in "ZX":
            names[int(stat.parent.name)] = before.partition("(")[2]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: dict[int, str] = {}
    wanted = [root]
    while wanted:
        pid = wanted.pop()
        if pid in names:
            found[pid] = names[pid]
        wanted += children.get(pid, ())
    return found
