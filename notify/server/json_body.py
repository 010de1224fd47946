"""The JSON body of a request to an admin route: decoded as strictly as those of data routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from notify.errors import InvalidRequest
from notify.protocol.wire import JSON, UNDECODABLE
from notify.server.data.request import media_type


def decoded(body: bytes) -> Any:
    """Decode a body. Raises InvalidRequest.

    Python's own decoder takes halves of surrogate pairs. An action that was recorded with one could not be shown, nor
    the actions of the same page.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", "invalid_schema") from None
    except UNDECODABLE as error:
        raise InvalidRequest(f"the body is not JSON: {error}", "invalid_schema") from None


def body_of(headers: Mapping[bytes, bytes], body: bytes) -> Any:
    """Decode a request's body by its headers, with names in lower case. Raises InvalidRequest."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidRequest("compressed bodies are not taken", "unsupported_encoding", 415)
    kind = headers.get(b"content-type", b"")
    if media_type(kind) != JSON.encode():
        raise InvalidRequest(f"send {JSON}, not {kind.decode('latin-1')[:60]!r}", "unsupported_type", 415)
    return decoded(body)


class _JsonRequest(Request):
    async def read(self) -> None:
        """Read and decode the body, if there is one. Raises InvalidRequest."""
        body = await self.body()
        if body:
            self._json = body_of(dict(self.scope["headers"]), body)  # `json` returns it, and FastAPI calls that


class JsonRoute(APIRoute):
    """A route of FastAPI that takes its body from `body_of`, once it has checked the caller's right."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, called with the decoded body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        checks = [check.dependency for check in self.dependencies if check.dependency is not None]

        async def handle_decoded(request: Request) -> Response:
            for check in checks:
                check(request)  # FastAPI asks again, but only after it has the body
            asked = _JsonRequest(request.scope, request.receive)
            await asked.read()
            return await handle(asked)

        return handle_decoded
