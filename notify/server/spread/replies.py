"""A worker's reply to a request that was passed on to it."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.responses import Response

Reply = tuple[int, bytes]
"""Status and body."""


def refusal(replies: Sequence[Reply]) -> Reply | None:
    """The first answer that refuses the request; a 404 counts only if no worker knows the name."""
    refusals = [reply for reply in replies if reply[0] != 200]
    known_refusals = [reply for reply in refusals if reply[0] != 404]
    if known_refusals:
        return known_refusals[0]
    return refusals[0] if refusals and len(refusals) == len(replies) else None


def response_of(reply: Reply) -> Response:
    """The reply as this server's response."""
    status, body = reply
    return Response(body, status, media_type="application/json" if status == 200 else "application/problem+json")
