"""Admin requests of a history, whose server may be unreachable."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any

from notify.errors import NotifyError
from tests.support.http import ask


class Failed(NotifyError):
    """A server failed on a request by a fault of its own."""


def admin(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An admin route's answer. Raises NotifyError if the server is unreachable or refuses, Failed for a fault of its
    own."""
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
    """Redrive all open dead letters of a group, part by part."""
    offset = 0
    while True:
        body = {"offset": offset} if offset else {}
        offset = admin(url, "POST", f"groups/{group}/dead-letters/redrive", body)["result"].get("next_offset", 0)
        if not offset:
            return


def dead_letters(url: str, group: str) -> list[Any]:
    """All dead letters of a group, part by part."""
    letters: list[Any] = []
    offset = 0
    while True:
        page = admin(url, "GET", f"groups/{group}/dead-letters?max=10000&offset={offset}")
        letters += page["messages"]
        if page["next_offset"] in (0, offset):
            return letters
        offset = page["next_offset"]
