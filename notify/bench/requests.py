"""Admin calls of the benches."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """An admin route's JSON answer. Raises urllib.error.HTTPError."""
    data = None if body is None else json.dumps({"reason": "bench", **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/admin/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def subscribe(url: str, group: str, topic: str, **fields: Any) -> None:
    """Make a subscription from the earliest message on."""
    call(url, "PUT", f"groups/{group}/subscriptions/{topic}", {"start": "earliest", **fields})
