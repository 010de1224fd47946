"""What a browser may be made to do by a page of someone else: nothing.

Other clients send neither `Sec-Fetch-Site` nor `Origin`. A browser sends one of them with every request that could
change something, and a page cannot forge them (https://www.w3.org/TR/fetch-metadata/).
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from notify.errors import Forbidden
from notify.settings import Settings

SAFE = ("GET", "HEAD", "OPTIONS")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def refuse_foreign_pages(method: str, headers: Iterable[tuple[bytes, bytes]], settings: Settings) -> None:
    """Raises Forbidden for a write that a foreign page makes, and for a foreign name of this machine.

    The second stops a page whose name was pointed at 127.0.0.1 (DNS rebinding): while access is off, the address is
    all that protects.
    """
    site = origin = host = b""
    for name, value in headers:
        if name == b"sec-fetch-site":
            site = value
        elif name == b"origin":
            origin = value
        elif name == b"host":
            host = value
    if (site or origin) and not settings.access and not _is_own(host.decode("latin-1"), settings):
        raise Forbidden(f"this server is not called {host.decode('latin-1')[:100]!r}; set url if it is", "foreign_host")
    if method in SAFE:
        return
    if site not in (b"", b"same-origin", b"none"):
        raise Forbidden("a page of another site sent this request: writes come from this server's own pages only")
    if origin and urlsplit(origin).netloc != host:
        raise Forbidden(f"a page of {origin.decode('latin-1')[:100]} sent this request; this is not its server")


def _is_own(host: str, settings: Settings) -> bool:
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    return name in _LOOPBACK or name == settings.host or (bool(settings.url) and urlsplit(settings.url).netloc == host)
