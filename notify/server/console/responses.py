"""The console's responses: a page, or what went wrong."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from notify.errors import NotifyError, Unauthorized
from notify.server.access.principal import EVERYONE
from notify.server.console.rendering import SECURITY, rendered


def page(template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    """A page made from a template of the console."""
    principal = request.state.principal
    who = "" if principal is EVERYONE else principal.name
    return HTMLResponse(
        rendered(template, request.scope["path"], who, dict(request.query_params), **values), status, SECURITY
    )


def failed(request: Request, error: NotifyError) -> Response:
    """A page with the error; if there is no valid token, a redirection to the login page."""
    if isinstance(error, Unauthorized):
        return RedirectResponse("/login?" + urlencode({"next": request.scope["path"]}), 303, SECURITY)
    return page("error.html", request, error.status, title="The request failed", error=error)
