"""The log of what runs within a user's program: its handlers and filters are the program's, and may raise."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any


class ProgramLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines fail nothing.

    Logging itself catches what its own handlers raise, but not what a program's handler or filter does. A message whose
    failure cannot be logged would otherwise stay in hand for ever, with all that were to be settled with it.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line; if that raises, write to stderr that it did."""
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line of the caller, and not this one
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except Exception:
            with suppress(Exception):  # there may be no stderr
                sys.stderr.write(f"a line of {self.logger.name} could not be logged:\n{traceback.format_exc()}")


def program_log(name: str) -> ProgramLog:
    """The log of this name."""
    return ProgramLog(logging.getLogger(name))
