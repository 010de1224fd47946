"""Admin requests of a history, whose server may be away."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any

from notify.errors import NotifyError
from tests.support.http import ask


class Failed(NotifyError):
    """A server failed on a request by a fault of its own."""


def admin(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An admin route's answer. Raises NotifyError if the server is away or refuses, Failed for a fault of its own."""
    try:
        wanted = None if method == "GET" else {"reason": "a history", **(body or {})}
        status, answer = ask(url, method, f"/v1/admin/{path}", wanted)
    except (OSError, HTTPException) as error:
        raise NotifyError(f"{method} {path}: {error}") from None
    if status == 500:
        raise Failed(f"{method} {path}: {status} {answer}")
    if status != 200:
        raise NotifyError(f"{method} {path}: {status} {answer}")
    return answer


def redrive(url: str, group: str) -> None:
    """Redrive all dead letters of a group."""
    admin(url, "POST", f"groups/{group}/dead-letters/redrive")
