"""The processes of a history: killed, frozen, replaced, and started again where they ended by themselves."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notify.testing import forked
from tests.history.tables import read_notes

END_SECONDS = 60.0
LOOK_SECONDS = 0.2
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
"""A process that a signal ends tells in its log where each of its threads was."""


def by_command(words: Sequence[str], log: Path) -> Any:
    """Start `python -m …`, which writes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words], stdout=output, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )  # fmt: skip


def by_fork(words: Sequence[str], log: Path) -> Any:
    """The same for a suite, whose fork server has imported what each process would import for a second."""
    process = forked.context().Process(target=_run, args=(list(words), log), daemon=True)
    process.start()
    return forked.Forked(process, io.StringIO(), words)


def _run(words: list[str], log: Path) -> None:
    """Run a module's `main`, in the child."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    faulthandler.enable()
    module = importlib.import_module(words[0])
    sys.argv = list(words)
    module.main()


class Actor:
    """A process, which may be started again with the same arguments."""

    launch = staticmethod(by_command)

    def __init__(self, words: Sequence[str], log: Path, notes: Path | None = None) -> None:
        self._words = words
        self._log = log
        self._notes = notes
        self._deaths = 0
        self._lock = threading.Lock()
        """Held by whoever starts or ends it."""
        self._is_running = False
        """Whether somebody started it, and has not ended it."""
        self.process: Any = None
        self.endings: list[str] = []
        """How it ended by itself."""
        self.is_crashed = False
        """Whether a signal ended it that nobody sent."""

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> None:
        self._is_running = True
        self.process = self.launch(self._words, self._log)

    def restart(self) -> None:
        """Kill it with SIGKILL, also if it is stopped, and start it again."""
        with self._lock:
            self._look()
            self.process.kill()
            self.process.wait(END_SECONDS)
            self._start()

    def replace(self, seconds: float) -> None:
        """Freeze it, and start another in its place; it wakes up later, and is killed unless it ends by itself."""
        with self._lock:
            frozen = self.process
            frozen.send_signal(signal.SIGSTOP)
            self._start()
        time.sleep(seconds)  # how long it is frozen
        frozen.send_signal(signal.SIGCONT)
        try:
            frozen.wait(seconds)
        except subprocess.TimeoutExpired:
            frozen.kill()
            frozen.wait(END_SECONDS)

    def revive(self) -> None:
        """Start it again if it has ended by itself."""
        with self._lock:
            if self._is_running and self._look():
                self._start()

    def _look(self) -> bool:
        """Whether it has ended by itself; how is noted."""
        code = self.process.poll()
        if code is None:
            return False
        deaths = sum(words[0] == "deadly" for words in read_notes(self._notes)) if self._notes else 0
        if code == -signal.SIGKILL and deaths > self._deaths:
            self._deaths = deaths
        else:
            self.endings.append(f"ended with {code}")
            self.is_crashed |= code < 0
        return True

    def leave(self, seconds: float = END_SECONDS) -> None:
        """End it by SIGTERM. It is noted if that does not suffice."""
        with self._lock:
            self._is_running = False
            if self._look():
                return
            self.process.terminate()
            try:
                code = self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.endings.append(f"did not end within {seconds:g} s of SIGTERM")
                self.process.kill()
                self.process.wait(END_SECONDS)
            else:
                if code not in (0, -signal.SIGTERM):
                    self._look()

    def close(self, seconds: float = 30.0) -> None:
        """End it, by SIGTERM if that suffices."""
        with self._lock:
            self._is_running = False
            if self.process is None or self.process.poll() is not None:
                return
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_SECONDS)


class Supervisor:
    """Starts processes again that have ended by themselves, as a service manager would."""

    def __init__(self, actors: Mapping[str, Actor]) -> None:
        self._actors = actors
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            for actor in list(self._actors.values()):
                with contextlib.suppress(OSError):
                    actor.revive()

    def stop(self) -> None:
        """Before the processes are ended."""
        self._over.set()
        self._thread.join()

    def endings(self) -> Counter[str]:
        """How often each process ended by itself, and how."""
        return Counter(f"{name} {ending}" for name, actor in self._actors.items() for ending in actor.endings)

    def crashed(self) -> list[str]:
        """A sentence for each process that a signal ended which nobody sent."""
        return [
            f"{name} {', '.join(actor.endings)}; see its log"
            for name, actor in self._actors.items()
            if actor.is_crashed
        ]
