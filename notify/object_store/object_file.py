"""The file that an object is written through: counted, hashed, and paced."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

CHUNK = 1 << 20
"""Bytes that are written at once: after each the store has shown that it lives."""


def no_pace(size: int) -> None:
    """As fast as the store goes."""


class Pace:
    """Waits so that no more than a rate of bytes passes. One thread at a time."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def __call__(self, size: int) -> None:
        """Wait until `size` more bytes may be sent at the rate."""
        now = time.monotonic()
        wait = self._free_at - now
        self._free_at = max(now, self._free_at) + size / self._rate
        if wait > 0:
            time.sleep(wait)


class FillFailed(Exception):
    """Carries what the caller's own function raised while it filled an object."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised


class ObjectFile:
    """A file to write into, as pyarrow and copying loops use one; it counts, hashes and paces."""

    closed = False

    def __init__(self, file: Any, pace: Callable[[int], None], alive: Callable[[], None]) -> None:
        self._file = file
        self._pace = pace
        self._alive = alive
        self.size = 0
        self.digest = hashlib.sha256()
        self.failed: BaseException | None = None
        """The error of the store; one of the function that fills the object leaves it None."""

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for at in range(0, len(view), CHUNK):
            self.guarded(partial(self._written, bytes(view[at : at + CHUNK])))
        return len(view)

    def _written(self, piece: bytes) -> None:
        self._pace(len(piece))
        self._alive()
        self._file.write(piece)
        self.digest.update(piece)
        self.size += len(piece)

    def guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self.failed = error
            raise

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Everything is written when the object is complete."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the store closes the object, not its writer."""
