"""LogOutput: the stream that a process logs to. A line that cannot be written is lost, without an error for the caller.

The disk may be full, or the reader gone: the process that reads a pipe has ended, or journald was restarted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO


class LogOutput:
    """Standard output or standard error, looked up at each write."""

    def __init__(self, name: str) -> None:
        """`name`: stdout or stderr."""
        self._name = name

    def _stream(self) -> TextIO | None:
        stream: TextIO | None = getattr(sys, self._name)  # None: the process was started without it
        return stream

    def write(self, text: str) -> None:
        """Write a text, or as much of it as the stream takes."""
        stream = self._stream()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
                stream.write(text)

    def flush(self) -> None:
        """Flush the stream. Once its reader is gone, all further output is discarded."""
        stream = self._stream()
        if stream is None:
            return
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                discard(stream)


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: otherwise each line would fail, and so would the flush at the process's end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


STDOUT, STDERR = LogOutput("stdout"), LogOutput("stderr")
