"""The JSON body of a request to an admin route: decoded as strictly as those of data routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from notify.errors import InvalidRequest
from notify.wire import JSON


def decoded(body: bytes) -> Any:
    """Decode a body. Raises InvalidRequest.

    Python's own decoder takes halves of surrogate pairs. An action that was recorded with one could not be shown, nor
    the actions beside it.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", "invalid_schema") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", "invalid_schema") from None


class _JsonRequest(Request):
    async def read(self) -> None:
        """Read and decode the body, if there is one. Raises InvalidRequest."""
        body = await self.body()
        if not body:
            return
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("compressed bodies are not taken", "unsupported_encoding", 415)
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != JSON:
            raise InvalidRequest(f"send {JSON}, not {kind[:60]!r}", "unsupported_type", 415)
        self._json = decoded(body)  # `json` returns it, and FastAPI calls that


class JsonRoute(APIRoute):
    """A route of FastAPI that takes its body from `decoded`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, called with the decoded body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_decoded(request: Request) -> Response:
            asked = _JsonRequest(request.scope, request.receive)
            await asked.read()
            return await handle(asked)

        return handle_decoded
