"""The stream that a process logs to. A line that it does not take is lost, and not an error of whoever logs it.

Its disk may be full, or its reader gone: the process behind a pipe has ended, or journald was started anew.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


class LogOutput:
    """Standard output or standard error, whichever file that is at the moment."""

    def __init__(self, name: str) -> None:
        """`name`: stdout or stderr."""
        self._name = name

    def _stream(self) -> TextIO | None:
        stream: TextIO | None = getattr(sys, self._name)  # None: the process was started without it
        return stream

    def write(self, text: str) -> None:
        """Write as much as the stream takes."""
        stream = self._stream()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
                stream.write(text)

    def flush(self) -> None:
        """Hand on what was written. Once nobody can read it any more, it goes nowhere."""
        stream = self._stream()
        if stream is None:
            return
        try:
            stream.flush()
        except BrokenPipeError:
            _discard(stream)
        except (OSError, ValueError):
            pass


def _discard(stream: TextIO) -> None:
    """Have a stream written to nothing: its lines would fail one by one, and so would the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


STDOUT, STDERR = LogOutput("stdout"), LogOutput("stderr")
