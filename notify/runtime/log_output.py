"""LogOutput: the stream that a process logs to. A line that cannot be written is lost, without an error for the caller.
LogRate bounds the lines that strangers can cause.

The disk may be full, or the reader gone: the process that reads a pipe has ended, or journald was restarted. Or the
reader is there and does not read: then the pipe is full, and a write would never return.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from collections.abc import Callable
from typing import TextIO

STDERR_FILE = 2
WAIT_SECONDS = 1.0
"""How long a line waits for a reader that does not read; then lines are lost, without a wait, until it reads again."""
PIECE_CHARACTERS = 400
"""The most that is written at a time. It has at most 4,096 bytes, which a pipe takes at once if it takes anything."""


class LogOutput:
    """Standard output or standard error, looked up at each flush."""

    def __init__(self, name: str) -> None:
        """`name`: stdout or stderr."""
        self._name = name
        self._unwritten: list[str] = []
        self._lost = 0
        """How many lines were lost since the output was written last, because its reader does not read."""

    def _stream(self) -> TextIO | None:
        stream: TextIO | None = getattr(sys, self._name)  # None: the process was started without it
        return stream

    def write(self, text: str) -> None:
        """Add a text to the line that `flush` writes."""
        self._unwritten.append(text)

    def flush(self) -> None:
        """Write the line, as far as the stream takes it. Once its reader is gone, all further output is discarded."""
        text = "".join(self._unwritten)
        self._unwritten.clear()
        stream = self._stream()
        if stream is None:
            return
        try:
            self._put(stream, text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                discard(stream)

    def _put(self, stream: TextIO, text: str) -> None:
        for start in range(0, len(text), PIECE_CHARACTERS):
            if not _takes(stream, 0.0 if self._lost else WAIT_SECONDS):
                self._lost += 1
                return
            if self._lost:
                lost, self._lost = self._lost, 0
                self._put(stream, f"\n{lost} lines of this log are lost because the output was not read\n")
            stream.write(text[start : start + PIECE_CHARACTERS])
            stream.flush()


def _takes(stream: TextIO, seconds: float) -> bool:
    """Whether a stream takes a piece within `seconds`, or fails at once."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True  # it is not a file
    waiting = select.poll()
    waiting.register(number, select.POLLOUT)
    return bool(waiting.poll(seconds * 1000))


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: otherwise each line would fail, and so would the flush at the process's end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


STDOUT, STDERR = LogOutput("stdout"), LogOutput("stderr")


class LogRate:
    """Allows `per_second` lines a second; further lines are left out."""

    def __init__(self, per_second: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._monotonic = monotonic
        self._second = 0
        self._count = 0

    def may(self) -> bool:
        """Whether another line may be written now; if so, it counts as written."""
        second = int(self._monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= self._per_second
