"""Who runs a command, as the records of what was done name them."""

from __future__ import annotations

import getpass
import os


def actor() -> str:
    """The user's name; where the system has none for this user's number, as in many containers, that number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return f"uid {os.getuid()}"


def signed(reason: str) -> str:
    """A reason with the user's name behind it."""
    return f"{reason} ({actor()})"
