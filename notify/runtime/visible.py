"""Makes text from outside safe for terminals and logs."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with invisible characters (control characters, direction marks, surrogates) escaped as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The text of `visible` on one line: line breaks are escaped too."""
    return visible(text).replace("\n", "\\n")
