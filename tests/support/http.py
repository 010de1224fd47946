"""The tests' HTTP client: plain JSON over the standard library, without the SDK."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from tests.support.clock import PATIENCE_SECONDS

JSON = "application/json"
REASON = "a test"
"""The reason that `admin` gives for its writes."""


def ask(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    token: str | None = None,
    headers: dict[str, str] | None = None,
    *,
    kind: str = JSON,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, Any]:
    """Make one request on a new connection; return its status and decoded answer (text if it is no JSON).

    `body`: bytes are sent unchanged, anything else as JSON. Raises OSError if the server is unreachable.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": kind} | ({} if token is None else {"authorization": f"Bearer {token}"}) | (headers or {})
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(raw)
    except ValueError:
        return answer.status, raw.decode()


def call(url: str, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
    """The answer of a request that must succeed; fails with the server's answer otherwise."""
    status, answer = ask(url, method, path, body, token)
    assert 200 <= status < 300, f"{method} {path} was answered with {status}: {answer}"
    return answer


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a POST that must succeed."""
    answer: dict[str, Any] = call(url, "POST", path, body)
    return answer


def admin(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of an admin request that must succeed; `path` begins after `/v1/admin/`; a write gets a reason."""
    return call(url, method, f"/v1/admin/{path}", body if body is None else {"reason": REASON, **body})


def refusal(url: str, method: str, path: str, /, **body: Any) -> tuple[int, str]:
    """Status and code of an admin request that must be refused."""
    sent = None if method == "GET" else {"reason": REASON, **body}
    status, problem = ask(url, method, f"/v1/admin/{path}", sent)
    assert status >= 400, f"{method} {path} was not refused, but answered with {status}: {problem}"
    return status, problem["code"]


def metric(url: str, name: str) -> float:
    """A sample of `/metrics` by its name and labels as printed; 0 if it is missing."""
    for line in str(call(url, "GET", "/metrics")).splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return 0.0


def is_ready(url: str) -> bool:
    """Whether a server answers and takes requests."""
    try:
        return ask(url, "GET", "/readyz")[0] == 200
    except OSError:
        return False
