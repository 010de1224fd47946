"""The console's responses: a page, or what went wrong."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from notify.admin_api.writes import FORMS
from notify.errors import NotifyError, Unauthorized
from notify.server.access.principal import EVERYONE, Principal
from notify.server.console.rendering import SECURITY, prefix_of, rendered


def redirect(request: Request, target: str) -> RedirectResponse:
    """A redirection to a path of this server."""
    return RedirectResponse(prefix_of(request.scope["headers"]) + target, 303, SECURITY)


def page(template: str, request: Request, code: int = 200, **values: Any) -> HTMLResponse:
    """A page made from a template of the console, answered with an HTTP status. `values` may have `status`, the answer
    of the admin route, for the menu."""
    principal = request.state.principal
    who = "" if principal is EVERYONE else principal.name
    query, values["host"] = dict(request.query_params), request.url.netloc
    values |= {"may": partial(_may, principal), "prefix": prefix_of(request.scope["headers"])}
    return HTMLResponse(rendered(template, request.scope["path"], who, query, **values), code, SECURITY)


def _may(principal: Principal, write: str, /, **targets: str) -> bool:
    """Whether a page offers a write: without the right it would be refused. `of`: the group of a transaction or job."""
    names = [targets[name] for name in ("topic", "group") if name in targets]
    return principal.may_write(FORMS[write].path, names) and (
        "of" not in targets or principal.may("admin", targets["of"])
    )


def failed(request: Request, error: NotifyError) -> Response:
    """A page with the error; if there is no valid token, a redirection to the login page."""
    if isinstance(error, Unauthorized) and request.method in ("GET", "HEAD"):
        query = request.scope["query_string"].decode("latin-1")
        target = request.scope["path"] + ("?" + query if query else "")
        return redirect(request, "/login?" + urlencode({"next": target}))
    return page("error.html", request, error.status, title="The request failed", error=error)
