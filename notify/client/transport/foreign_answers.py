"""Answers that are not a Notify server's: a sentence that says who gave them, and a line a minute in the log.

Proxies answer for a server that is restarted or too slow, that a request is too large for, or that they want a login
for. Whatever the status, such an answer says nothing about the request: the server counts as unreachable.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable

from notify.errors import ForeignAnswer, NotifyError
from notify.runtime.program_log import program_log

log = program_log("notify.client")

SAID_SECONDS = 60.0
SHORTEST_POLL_SECONDS, SAFE_SHARE = 1.0, 0.75
"""The shortest poll; and how much of the time that a proxy has waited later polls take."""
_TOO_LONG = (408, 504, 524)
"""The statuses that proxies answer when a server has not answered in time; 524 is Cloudflare's."""
WORDS = 80
"""The most characters of a page that are quoted."""
_NOT_SHOWN = re.compile(r"(?is)<(script|style|title)\b.*?(</\1\s*>|\Z)|<!--.*?(-->|\Z)|<[^>]*>")
_TITLE = re.compile(r"(?is)<title[^>]*>(.*?)</title")
_BOUNDS = "nginx: client_max_body_size; Envoy: max_request_bytes of its buffer filter"


class PollTime:
    """How long a poll waits at the server: less than a proxy in between waits for an answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def was_cut(self, error: NotifyError, lasted: float) -> bool:
        """Whether a poll failed after so many seconds only because a proxy waits no longer; the next ones are shorter.

        A poll that a proxy has ended had nothing to bring, or what it brought comes again.
        """
        is_cut = isinstance(error, ForeignAnswer) and error.answered in _TOO_LONG and lasted < self.seconds
        if is_cut:
            self.seconds = max(SHORTEST_POLL_SECONDS, lasted * SAFE_SHARE)
        return is_cut and lasted > SHORTEST_POLL_SECONDS


class Foreign:
    """The answers to one client that are not a server's."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic`: a clock in seconds."""
        self._monotonic = monotonic
        self._said_at = -SAID_SECONDS

    def answer(self, request: str, size: int, status: int, head: bytes, body: bytes) -> ForeignAnswer:
        """The error for an answer; it is logged, at most once in SAID_SECONDS.

        `request`: method and address; `size`: the bytes of its body; `head`: the first bytes of the answer.
        """
        error = ForeignAnswer(_sentence(request, size, status, head, body), answered=status)
        now = self._monotonic()
        if now - self._said_at >= SAID_SECONDS:
            self._said_at = now
            log.warning("the server counts as unreachable: %s", error)
        return error


def foreign_content(why: str) -> ForeignAnswer:
    """The error for a 200 answer whose content is not a server's."""
    return ForeignAnswer(
        f"a 200 answer is not in a Notify server's format ({why}): look at the proxy in between, which answers itself "
        "or changes answers, or correct the address",
        answered=200,
    )


def _sentence(request: str, size: int, status: int, head: bytes, body: bytes) -> str:
    server, kind, place = (_field(head, name) for name in (b"server", b"content-type", b"location"))
    who = ", ".join(
        part for part in (server and f"Server: {server}", kind.partition(";")[0] or "no content type") if part
    )
    words = _words(body)
    said = f"{request} was answered with {status} ({who}), and not by a Notify server"
    if words:
        said += f": “{words}”"
    if status == 413:
        return f"{said}; a request with {size:,} bytes is above the bound of a proxy in between: raise it ({_BOUNDS})"
    if 300 <= status < 400 and place:
        return f"{said}; it leads to {place}: give the server's own address"
    return f"{said}; look at the proxy in between, or correct the address"


def _field(head: bytes, name: bytes) -> str:
    """A field of an answer's head as printable text; "" without it."""
    found = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head.partition(b"\r\n\r\n")[0], re.IGNORECASE)
    return "" if found is None else _printable(found[1].decode("latin-1"))


def _words(body: bytes) -> str:
    """The first words that a page shows; its title if it shows none."""
    text = body[:4096].decode(errors="replace")
    title = _TITLE.search(text)
    return _printable(html.unescape(_NOT_SHOWN.sub(" ", text))) or _printable(html.unescape(title[1] if title else ""))


def _printable(text: str) -> str:
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return shown if len(shown) <= WORDS else shown[: WORDS - 1] + "…"
