"""Calls admin routes within the process, as the principal who opened the page."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, unquote, urlencode

from fastapi import Request
from starlette.types import ASGIApp, Message

from notify.errors import NotifyError
from notify.runtime import faults


class Refused(NotifyError):
    """An admin route's answer other than 200."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(str(problem.get("detail", "the server refused this")))
        self.status = status
        self.code = str(problem.get("code", "error"))


def path_of(template: str, **names: str) -> str:
    """The path of an admin route, such as `groups/{group}/reset`, with names filled in and quoted."""
    return "/v1/admin/" + template.format(**{name: quote(value, safe="") for name, value in names.items()})


async def status_of(api: Api) -> dict[str, Any] | None:
    """The server's name and what waits, for the menu; None if the server does not say, which takes no page away."""
    try:
        return await api.get("status")
    except NotifyError:
        return None
    except Exception as error:
        faults.unexpected("status_not_shown", error)
        return None


class Api:
    """Calls admin routes for one page."""

    def __init__(self, routes: ASGIApp, request: Request) -> None:
        """`routes` serves the admin routes; `request` is the browser's."""
        self._routes = routes
        self._request = request

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The answer to a GET; empty values of `query` are left out. Raises Refused."""
        conditions = {name: value for name, value in query.items() if value not in (None, "")}
        return await self.call("GET", path if path.startswith("/") else "/v1/admin/" + path, query=conditions)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, query: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer of a route. Raises Refused for a status other than 200."""
        data = b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": urlencode(query or {}).encode(),
            "headers": [(b"content-type", b"application/json"), (b"x-notify-user", b"console")],
            "client": None,
            "server": None,
            "root_path": "",
            "state": {"principal": self._request.state.principal, "shown": self._request.state.shown},
        }
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._routes(scope, receive, send)
        status = int(sent[0]["status"])
        text = b"".join(message.get("body", b"") for message in sent[1:])
        answer = json.loads(text) if text else {}
        if status != 200:
            raise Refused(status, answer if isinstance(answer, dict) else {})
        return dict(answer)
