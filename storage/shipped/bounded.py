"""A bound on calls that may hang for ever: a store that gives no sign of life for a time is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Bounded:
    """A call in a thread of its own, given up when it shows no sign of life for a time: a thread cannot be ended, but
    what it still does fails at its next sign."""

    def __init__(self, call: Callable[[Callable[[], None]], Any], stall_seconds: float) -> None:
        self._call = call
        self._stall_seconds = stall_seconds
        self._alive_at = time.monotonic()
        self._given_up = False
        self._done = threading.Event()
        self._result: Any = None
        self._raised: BaseException | None = None

    def result(self) -> Any:
        """Raises what the call raises, or TimeoutError."""
        threading.Thread(target=self._run, daemon=True, name="store").start()
        while True:
            left = self._alive_at + self._stall_seconds - time.monotonic()
            if self._done.wait(max(left, 0.0)):
                break
            if self._alive_at + self._stall_seconds <= time.monotonic():
                self._given_up = True
                raise TimeoutError(f"no sign of life for {self._stall_seconds:g} s")
        if self._raised is not None:
            raise self._raised
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call(self._alive)
        except BaseException as error:
            self._raised = error
        self._done.set()

    def _alive(self) -> None:
        if self._given_up:
            raise TimeoutError("given up")
        self._alive_at = time.monotonic()
