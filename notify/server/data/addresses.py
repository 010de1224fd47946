"""Addresses of this machine's servers as whoever asks can reach them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

ANY_ADDRESS = ("0.0.0.0", "::")


def reached(shown: dict[str, Any], host: str) -> dict[str, Any]:
    """The answer of `GET /v1/members`, with `host`, to which the request went, for a server that listens on all
    addresses: in a container, or behind a port that is mapped, it knows no other name of its own.

    Members of a registry are other machines': those stay as they announce themselves.
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
    # With TLS each worker has a port of its own.
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()
