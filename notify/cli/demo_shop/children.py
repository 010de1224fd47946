"""Starts and kills the shop's processes, and reads the files that they write. The conductor decides when."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from notify.cli.demo_shop.end import End, Lost, read_lost

SHOP = (sys.executable, "-m", "notify.cli.demo_shop.shop")
LINES = 10
"""The number of last lines of a process's stderr that the demo shows."""
REAP_SECONDS = 60.0
"""How long to wait for the end of a killed process, which may wait for a disk."""


class Children:
    """Producers and consumers by name ("producer 1"). A killed process is started again, as its next life."""

    def __init__(
        self, directory: Path, specs: dict[str, tuple[str, dict[str, Any]]], program: Sequence[str] = SHOP
    ) -> None:
        """`directory`: the directory of the run. `specs`: the role and the specification of each process, which are the
        arguments of `program`."""
        self._directory = directory
        self._specs = specs
        self._program = program
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lives = dict.fromkeys(specs, 0)
        self._stop = directory / "stop"
        self._lost = directory / "lost"
        self.attempts = directory / "attempts"
        """The file with the number of every order that was begun."""

    def names(self) -> list[str]:
        return list(self._specs)

    # --- lives ------------------------------------------------------------------------------------------------

    def start(self, name: str, end: End | None) -> str:
        """Start the next life of a process, and return its name. `end`: where it kills itself; None: it does not."""
        self._lives[name] += 1
        role, spec = self._specs[name]
        process = self._label(name)
        spec = spec | {
            "process": process,
            "attempts": str(self.attempts),
            "stop": str(self._stop),
            "stopped": str(self._stopped(name)),
            "lost": str(self._lost),
            "end": None if end is None else dataclasses.asdict(end),
        }
        with self._stderr(name).open("ab") as stderr:
            self._processes[name] = subprocess.Popen(
                [*self._program, role, json.dumps(spec)], stdout=subprocess.DEVNULL, stderr=stderr
            )
        return process

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait(REAP_SECONDS)

    def exit_code(self, name: str) -> int | None:
        """The exit code; None while the process runs."""
        return self._processes[name].poll()

    def end(self) -> None:
        """Kill all running processes."""
        for name, process in self._processes.items():
            if process.poll() is None:
                self.kill(name)

    # --- files ------------------------------------------------------------------------------------------------

    def lost(self) -> list[Lost]:
        """The transactions whose producers killed themselves before they sent the outcome."""
        return read_lost(self._lost)

    def stop_orders(self) -> None:
        """Tell the producers to begin no more orders."""
        self._stop.touch()

    def orders_have_stopped(self) -> bool:
        """Whether every running producer has reported that it begins no more orders."""
        producers = [name for name, (role, _) in self._specs.items() if role == "orders"]
        return all(self._stopped(name).exists() for name in producers)

    def last_words(self) -> dict[str, list[str]]:
        """The last lines of each process's stderr, over all its lives."""
        return {name: last_lines(self._stderr(name), LINES) for name in self._specs}

    def _label(self, name: str) -> str:
        return f"{name} (life {self._lives[name]})"

    def _stopped(self, name: str) -> Path:
        return self._directory / f"{self._label(name)} has stopped"

    def _stderr(self, name: str) -> Path:
        return self._directory / f"{name.replace(' ', '-')}.stderr"


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of a file that are not empty, within its last 16 KiB."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - 16_384))
        lines = opened.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]
