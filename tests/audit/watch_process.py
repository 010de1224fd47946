"""`notify audit watch` as a process of a campaign: its lines, its files, its memory, and its deaths."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from notify.testing.usage import anonymous_bytes, resident_mb
from tests.support.clock import eventually

LONGEST_SECONDS = 1800
"""The longest wait for the watch's next line, or for a death, on the slowest machine."""
JVM_SECONDS = 30.0
"""So long the JVM of a watch that was killed may take to notice, and to clean up."""


class WatchProcess:
    """Starts the watch again and again. `state`: its directory; `temporary`: where Spark keeps its files."""

    def __init__(self, flags: Sequence[str], state: Path, temporary: Path) -> None:
        self._command = [
            sys.executable, "-m", "tests.audit.watch_of_small_files", "audit", "watch", "--json", *flags,
            "--state", str(state), "--memory", "1g",
        ]  # fmt: skip
        self._state = state
        self._temporary = temporary
        temporary.mkdir()
        self._written: dict[str, list[dict[str, Any]]] = {}
        self.lines: list[dict[str, Any]] = []
        """All that it printed in all its lives."""
        self.process: subprocess.Popen[str] | None = None

    def start(self, crash_at: str = "") -> None:
        """`crash_at`: a crash point and a count, where it dies."""
        environment = os.environ | {"NOTIFY_CRASH_AT": crash_at, "TMPDIR": str(self._temporary)}
        environment["SPARK_LOCAL_DIRS"] = str(self._temporary)
        environment["JAVA_TOOL_OPTIONS"] = f"-Djava.io.tmpdir={self._temporary}"
        with (self._state.parent / "errors.txt").open("a") as errors:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=environment,
            )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append(json.loads(line))

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_until_dead(self, meanwhile: Callable[[], None]) -> int:
        """Wait until it has died by itself; its exit code. `meanwhile` is called now and then."""
        assert self.process is not None
        process = self.process

        def has_died() -> bool:
            meanwhile()
            return process.poll() is not None

        eventually(has_died, "the watch to die", LONGEST_SECONDS)
        self._wait_for_its_jvm()
        return int(process.returncode)

    def _wait_for_its_jvm(self) -> None:
        """The JVM sees that its parent is gone, and ends; else it is killed."""
        assert self.process is not None
        with contextlib.suppress(AssertionError):
            eventually(self._group_is_gone, "the JVM to end", JVM_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _group_is_gone(self) -> bool:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def stop(self) -> int:
        """End it with SIGTERM; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LONGEST_SECONDS)
        self._wait_for_its_jvm()
        return code

    def kill(self) -> None:
        """Kill it with its JVM, if it runs."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LONGEST_SECONDS)

    def windows(self) -> int:
        """How many windows it has audited, as it printed."""
        return len({line["window_us"] for line in self.lines if line["kind"] == "window"})

    # --- what it uses -----------------------------------------------------------------------------------------

    def memory_mb(self) -> tuple[float, float]:
        """MiB of Python's own memory, and of everything, the JVM too."""
        assert self.process is not None
        return anonymous_bytes(self.process.pid) / (1 << 20), resident_mb(self.process.pid)

    def disk_bytes(self) -> dict[str, int]:
        """Bytes of its state, of its copies of the log, and of Spark's files."""
        copies = self._state / "segments"
        return {
            "state": sum(_size(path) for path in self._state.glob("*") if path != copies),
            "copies": sum(_size(path) for path in copies.rglob("*")),
            "Spark": sum(_size(path) for path in self._temporary.rglob("*")),
        }

    # --- findings.jsonl ---------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Read the files of lines that are full; the watch deletes them after a while."""
        for path in sorted(self._state.glob("findings-*.jsonl")):
            if path.name not in self._written:
                with contextlib.suppress(FileNotFoundError):
                    self._written[path.name] = _lines_of(path)

    def all_lines(self) -> list[dict[str, Any]]:
        """All lines of all files, also of those that are deleted. Fails if a file was missed."""
        self.collect()
        numbers = sorted(int(re.sub(r"\D", "", name)) for name in self._written)
        assert numbers == list(range(1, len(numbers) + 1)), f"files were deleted before they were read: {numbers}"
        last = self._state / "findings.jsonl"
        lines = [line for name in sorted(self._written) for line in self._written[name]]
        return lines + (_lines_of(last) if last.exists() else [])

    @property
    def renamed(self) -> int:
        return len(self._written)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
