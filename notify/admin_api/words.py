"""Formats numbers, times, results and bodies for people, in the console and in commands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from notify.protocol.large_bodies import ENCODING, PLACE, ZSTD, reference_of


def count(value: float | None) -> str:
    """A number such as 1,234,567."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units, such as 1 h 5 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    for size, unit, smaller, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // smaller
            return f"{total // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{total} s"


def latency(seconds: float | None) -> str:
    """A short time to three digits, such as 4.2 ms or 1.25 s; from two minutes on as `duration`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds >= 120:
        return duration(seconds)
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def percent(share: float | None) -> str:
    """A share of 1 in percent, to two decimals, cut off: 0.98999 is 98.99 %, and not the 99 % that it missed."""
    return "–" if share is None else f"{math.floor(share * 10_000 + 1e-6) / 100:.4g} %"


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the loop returns")


def exactly(text: str | None) -> str:
    """An RFC 3339 instant in UTC, to the second."""
    return "–" if not text else text[:19].replace("T", " ") + " UTC"


def whole(seconds: float) -> str:
    """Seconds in the largest unit, such as 5 min."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


STATUS = {
    200: "done before",
    201: "sent",
    204: "dropped",
    404: "not there",
    409: "refused",
    410: "gone",
    422: "refused",
}
"""The word for the result of one message that is sent again or dropped, by its HTTP status."""


def status(number: int) -> str:
    """The HTTP status of one item as a word."""
    return STATUS.get(number, f"failed ({number})")


def setting(value: Any) -> str:
    """A setting's value, or the settings that a revision changes, as people write them."""
    if isinstance(value, dict):
        return ", ".join(f"{name} = {_inner(inner)}" for name, inner in value.items() if inner != {}) or "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.15g}"
    return "–" if value in ("", None) else str(value)


def _inner(value: Any) -> str:
    return f"({setting(value)})" if isinstance(value, dict) else setting(value)


JOBS = {
    "redrive": "send dead letters again",
    "drop": "drop dead letters",
    "transactions.commit": "commit transactions",
    "transactions.rollback": "roll back transactions",
    "transactions.check": "check transactions again",
}


def job(what: str) -> str:
    """A job's work in words."""
    return JOBS.get(what, what)


def describe_body(message: Mapping[str, Any]) -> str:
    """Where the body of a message lies, or how it is compressed; empty if the message has it as it was sent.

    `message`: as the routes show it, with `body` or `body_base64`.
    """
    headers = message.get("headers") or {}
    if not isinstance(headers, Mapping):
        return ""
    encoding = f", compressed ({ZSTD})" if headers.get(ENCODING) == ZSTD else ""
    if PLACE in headers:
        reference = reference_of(str(message.get("body", "")))
        if reference is None:
            return ""
        return f"in a store{encoding}: {reference.url}, {size(reference.size)}, SHA-256 {reference.sha256}"
    if encoding:
        encoded = str(message.get("body_base64", ""))
        length = len(encoded) * 3 // 4 - encoded.count("=") if encoded else len(str(message.get("body", "")).encode())
        return f"{size(length)}{encoding}"
    return ""
