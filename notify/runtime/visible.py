"""Text for people: makes text from outside safe for terminals and logs, and shortens lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def visible(text: str) -> str:
    """The text with invisible characters (control characters, direction marks, surrogates) escaped as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The text of `visible` on one line: line breaks are escaped too."""
    return visible(text).replace("\n", "\\n")


def first_of(names: Sequence[str], most: int) -> str:
    """The first `most` of these names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
