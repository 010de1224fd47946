"""JSON requests of the benches."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer of a route. Raises urllib.error.HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def subscribe(url: str, group: str, topic: str, **fields: Any) -> None:
    """Make a subscription from the earliest message on."""
    body = {"reason": "bench", "start": "earliest"} | fields
    call(url, "PUT", f"/v1/admin/groups/{group}/subscriptions/{topic}", body)
