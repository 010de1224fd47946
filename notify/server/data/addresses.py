"""The addresses of this machine's servers at which the client that asks can reach them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

ANY_ADDRESS = ("0.0.0.0", "::")


def reached(shown: dict[str, Any], host: str) -> dict[str, Any]:
    """The answer of `GET /v1/members` in which servers that listen on all addresses have `host`, the request's host: in
    a container, or behind a mapped port, they know no other name.

    Members of a registry run on other machines, and keep the addresses that they announce.
    """
    if not host or (shown["version"] and "keys" not in shown):
        return shown
    return shown | {"members": [member | {"url": _reached(member["url"], host)} for member in shown["members"]]}


def _reached(url: str, host: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in ANY_ADDRESS:
        return url
    if parts.scheme == "http":
        return parts._replace(netloc=host).geturl()
    # With TLS each worker has its own port.
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()
