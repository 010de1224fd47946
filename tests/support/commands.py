"""Runs `notify …` in the test's own process, without a second of imports each time, or as a process to kill."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import cache
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from notify.cli import main
from notify.errors import NotifyError
from notify.testing.process import Child, ServerProcess
from tests.support.clock import PATIENCE_SECONDS


@cache
def registered() -> None:
    main.register()


def cli(*words: str) -> tuple[int, dict[str, Any]]:
    """Run a command; return its exit code and its output: the JSON, or `{"text": …}`, also of an error in JSON."""
    registered()
    result: Result = CliRunner().invoke(main.app, list(words), auto_envvar_prefix="NOTIFY")
    if isinstance(result.exception, NotifyError):
        return 2, {"text": f"notify: {result.exception}"}
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    shown = json.loads(result.stdout) if result.stdout.startswith("{") else {"text": result.output}
    if list(shown) == ["error"]:
        shown["text"] = f"notify: {shown['error']['detail']}"
    return result.exit_code, shown


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
