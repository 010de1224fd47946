"""The name of the user who runs a command, for the server's records of actions."""

from __future__ import annotations

import getpass
import os


def actor() -> str:
    """The user's name; the user's number if the system has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return f"uid {os.getuid()}"


def signed(reason: str) -> str:
    """The reason, followed by the user's name in parentheses."""
    return f"{reason} ({actor()})"
