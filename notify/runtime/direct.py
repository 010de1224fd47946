"""Calls of Notify servers with urllib, straight to the given address.

The SDK's own client knows no proxies, and neither does this: with `HTTP_PROXY` set for the world outside, urllib would
ask the proxy even for a server on this machine. A redirect is an error, as it is to the SDK: urllib would take the
token along to wherever it leads.
"""

from __future__ import annotations

import ssl
import urllib.request
from typing import Any


class Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would continue as a GET without its body, and the answer to that would count."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect itself is the answer, as an HTTPError."""


def open_directly(request: urllib.request.Request | str, seconds: float, tls: ssl.SSLContext | None = None) -> Any:
    """The open answer of a server (an `http.client.HTTPResponse`), without a proxy or a redirect; `seconds`: the
    time-out of each step. Raises OSError; for a status other than success it is an HTTPError."""
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), Stay()]
    return urllib.request.build_opener(*handlers).open(request, timeout=seconds)
