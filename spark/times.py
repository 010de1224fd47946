"""Instants as text."""

from __future__ import annotations

import time


def instant_text(us: int) -> str:
    """An instant (microseconds since 1970) to the second, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(us / 1e6))
