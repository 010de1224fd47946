"""Runs `notify …` in the test's own process, without a second of imports each time, or as a process to kill."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from notify.cli import main
from notify.errors import NotifyError
from notify.testing.process import Child, ServerProcess
from tests.support.clock import PATIENCE_SECONDS


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code and output, and what it raised, which `notify.cli.main.main` would tell."""

    exit_code: int
    stdout: str
    output: str
    exception: BaseException | None


def run(words: Sequence[str]) -> Ended:
    """Run a command in this process. All commands have the same parser: making it takes longer than most of them."""
    exit_code, exception = 0, None
    with CliRunner().isolation() as (stdout, _, output):
        try:
            main.command().main(args=list(words), prog_name="notify", auto_envvar_prefix="NOTIFY")
        except SystemExit as ended:
            exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception as raised:
            exit_code, exception = 1, raised
        sys.stdout.flush()
        sys.stderr.flush()
        return Ended(exit_code, stdout.getvalue().decode(), output.getvalue().decode(), exception)


def cli(*words: str) -> tuple[int, dict[str, Any]]:
    """Run a command; return its exit code and its output: the JSON, or `{"text": …}`, also of an error in JSON."""
    ended = run(words)
    if isinstance(ended.exception, NotifyError):
        return 2, {"text": f"notify: {ended.exception}"}
    if ended.exception is not None:
        raise ended.exception
    shown = json.loads(ended.stdout) if ended.stdout.startswith("{") else {"text": ended.output}
    if list(shown) == ["error"]:
        shown["text"] = f"notify: {shown['error']['detail']}"
    return ended.exit_code, shown


class Command:
    """`notify …` as a process: started as servers are, killed, and started again."""

    def __init__(self, *words: str) -> None:
        self._words = words
        self.launch = ServerProcess.launch
        """Starts the next process; `tests.support.versions.launched_in` starts another version."""
        self.process: Child | None = None
        self.output: list[str] = []
        """The last lines of output of all its processes."""

    def start(self) -> Command:
        self.process = self.launch(self._words, os.environ)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        return self

    def kill(self) -> None:
        """Kill it with SIGKILL. Raises AssertionError if it had ended by itself."""
        assert self.process is not None
        code = self.process.poll()
        assert code is None, f"notify {self._words[0]} ended by itself with {code}: {''.join(self.output)[-3000:]}"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def _read(self, process: Child) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output.append(line)
                del self.output[:-200]
