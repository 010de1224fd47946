"""Filters of the templates: figures, times and bodies as text for people."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape

BODY_CHARACTERS = 20_000


def count(value: float | None) -> str:
    """1234567 as 1,234,567."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units, as 1 h 5 min."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for size, unit, smaller, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // smaller
            return f"{total // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{total} s"


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the loop returns")


def moment(text: str | None) -> str:
    """An RFC 3339 instant, in UTC and to the millisecond, for people."""
    return "–" if not text else text[:23].rstrip("Z").replace("T", " ") + " UTC"


def body(message: dict[str, Any]) -> str:
    """A message's body: JSON indented, text as it is, bytes in hexadecimal."""
    if "body_base64" in message:
        raw = base64.b64decode(message["body_base64"])
        return raw[: BODY_CHARACTERS // 3].hex(" ")
    text = str(message.get("body", ""))
    try:
        if text[:1] in "{[":
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        pass  # then it is text that begins so
    return text[:BODY_CHARACTERS]


def plain(value: Any) -> str:
    """An answer's content as text for people."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)[:BODY_CHARACTERS]


def marked(text: str) -> Markup:
    """A setting's paragraph as HTML: text in backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


FILTERS: dict[str, Callable[..., str]] = {
    "count": count,
    "duration": duration,
    "size": size,
    "moment": moment,
    "body": body,
    "plain": plain,
    "marked": marked,
}
