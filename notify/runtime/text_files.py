"""Reads text files whose paths are settings."""

from __future__ import annotations

from pathlib import Path

from notify.errors import InvalidRequest


def text_of(setting: str, path: str) -> str:
    """The text of a UTF-8 file. Raises InvalidRequest if it cannot be read; `setting`: the setting with the path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
        raise InvalidRequest(f"{setting}: {path} cannot be read: {why}") from None
