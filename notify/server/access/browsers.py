"""Requests of browsers: a page of someone else may make them do nothing.

A browser sends `Sec-Fetch-Site` or `Origin` with every request that could change something, and a page cannot forge
them (https://www.w3.org/TR/fetch-metadata/); other clients send neither. A page whose name was pointed at 127.0.0.1
(DNS rebinding) is of the same origin as the server, and its reads carry neither of them: its `Host` gives it away.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from notify.errors import Forbidden
from notify.settings import Settings

SAFE = ("GET", "HEAD", "OPTIONS")


def refuse_foreign_pages(method: str, headers: Iterable[tuple[bytes, bytes]], settings: Settings) -> None:
    """Raises Forbidden for a write that a foreign page makes, and while access is off for a foreign name of this
    machine: then the address is all that protects, from being read, too.
    """
    site = origin = host = b""
    for name, value in headers:
        if name == b"sec-fetch-site":
            site = value
        elif name == b"origin":
            origin = value
        elif name == b"host":
            host = value
    if not settings.access:
        refuse_foreign_host(host, settings)
    if method in SAFE:
        return
    if site not in (b"", b"same-origin", b"none"):
        raise Forbidden("a page of another site sent this request: writes come from this server's own pages only")
    if origin and origin.partition(b"://")[2] != host:
        raise Forbidden(f"a page of {origin.decode('latin-1')[:100]} sent this request; this is not its server")


def refuse_foreign_host(host: bytes, settings: Settings) -> None:
    """Raises Forbidden for the header `Host` of a request that was sent to another name than the server's."""
    if not is_own_host(host, settings.host, settings.url):
        raise Forbidden(f"this server is not called {host.decode('latin-1')[:100]!r}; set url if it is", "foreign_host")


@lru_cache(maxsize=1000)
def is_own_host(host: bytes, own: str, url: str) -> bool:
    """Whether the header `Host` names this server: by its own name, by an address, or by no name at all.

    An address is nobody's name, and every browser sends a name. `own`: the host that the server listens on; `url`: the
    address that it announces.
    """
    text = host.decode("latin-1").lower()
    if not text:
        return True
    name = text.rpartition(":")[0] if ":" in text.rpartition("]")[2] else text
    if name == "localhost" or name.endswith(".localhost") or name == own.lower():
        return True
    if url and url.partition("://")[2].partition("/")[0].lower() == text:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
