"""Refuses requests that a foreign page makes through a user's browser.

A browser sends `Sec-Fetch-Site` or `Origin` with every request that could change something, and a page cannot forge
these headers (https://www.w3.org/TR/fetch-metadata/); other clients send neither. A page whose name was pointed at
127.0.0.1 (DNS rebinding) has the same origin as the server, and its reads carry neither header. The header `Host`
shows that page's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from notify.errors import Forbidden
from notify.server.settings import Settings

SAFE = ("GET", "HEAD", "OPTIONS")
HOST_BYTES = 300
"""The most bytes of a header `Host`: a name has at most 255, and a port follows."""


def refuse_foreign_pages(method: str, headers: Iterable[tuple[bytes, bytes]], settings: Settings) -> None:
    """Raises Forbidden for a write from a foreign page.

    While access is off it also raises Forbidden for any request with a foreign `Host`: nothing but the address protects
    such a server, reads included.
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
    """Raises Forbidden if the header `Host` has a name that is not the server's."""
    if not is_own_host(host, settings.host, settings.url):
        raise Forbidden(
            f"this server is not called {host.decode('latin-1')[:100]!r}: let the proxy in between pass on the "
            "client's own Host (nginx: proxy_set_header Host $http_host), or set url to the name",
            "foreign_host",
        )


def is_own_host(host: bytes, listen_host: str, url: str) -> bool:
    """Whether the header `Host` is this server's name, an IP address, or empty.

    An address cannot be a rebound name, and every browser sends the header. `listen_host`: the host that the server
    listens on; `url`: the address that it announces.
    """
    return len(host) <= HOST_BYTES and _is_own(host, listen_host, url)


@lru_cache(maxsize=1000)
def _is_own(host: bytes, listen_host: str, url: str) -> bool:
    text = host.decode("latin-1").lower()
    if not text:
        return True
    name = text.rpartition(":")[0] if ":" in text.rpartition("]")[2] else text
    if name == "localhost" or name.endswith(".localhost") or name == listen_host.lower():
        return True
    if url and url.partition("://")[2].partition("/")[0].lower() == text:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
