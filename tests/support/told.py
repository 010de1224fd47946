"""Python programs in processes that are told to end by signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from notify.runtime import signals
from tests.support.clock import PATIENCE_SECONDS

CONSUMING = """
import sys, threading
from notify.client import Consumer

consumer = Consumer(sys.argv[1], group=sys.argv[2])

@consumer.subscribe(sys.argv[2], mode=sys.argv[3], start="earliest")
def hang(message):
    print("handling", flush=True)
    threading.Event().wait()

consumer.run()
print("ended", flush=True)
"""
"""A consumer of a URL, in a group and of a topic of one name and in a mode, whose handler never returns."""


def hear_hangups() -> None:
    """Let a new process end by SIGHUP, although nohup may have begun this run of tests: a `preexec_fn`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Told:
    """A process whose output is waited for before each signal. It ends with its context at the latest."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_hangups,
        )
        self.output = ""

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def wait_for(self, text: str) -> None:
        """Wait until a line with this text has come."""
        assert self._process.stdout is not None
        while text not in self.output and (line := self._process.stdout.readline()):
            self.output += line
        assert text in self.output, self.output

    def kill(self) -> None:
        """End it at once, by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def tell(self, after: str, number: int) -> None:
        """Send a signal once a line with `after` has come."""
        self.wait_for(after)
        time.sleep(signals.SAME_REQUEST_SECONDS)  # what comes sooner after another signal counts as the same one
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit code, and the rest of its output."""
        self.output += self._process.communicate(timeout=PATIENCE_SECONDS)[0]
        return self._process.returncode
