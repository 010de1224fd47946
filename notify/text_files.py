"""Text files that a setting names."""

from __future__ import annotations

from pathlib import Path

from notify.errors import InvalidRequest


def text_of(named: str, path: str) -> str:
    """The text of a file in UTF-8. Raises InvalidRequest where it cannot be read; `named`: the setting."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is no text"
        raise InvalidRequest(f"{named}: {path} cannot be read: {why}") from None
