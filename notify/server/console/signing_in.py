"""Signing in with a token, which the browser stores in a cookie, and signing out."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from notify.errors import NotifyError
from notify.server.access.guard import COOKIE, Door
from notify.server.console.forms import form_of
from notify.server.console.rendering import SECURITY, page
from notify.settings import Settings

SIGNED_IN_SECONDS = 12 * 3600


def add_routes(routes: APIRouter, door: Door) -> None:
    """Add the routes for signing in and out; `door` verifies tokens."""

    @routes.get("/login", response_model=None)
    async def login(request: Request) -> Response:
        return page(
            "login.html", request, title="Sign in", refused="", next=_own_path(request.query_params.get("next"))
        )

    @routes.post("/login", response_model=None)
    async def signed_in(request: Request) -> Response:
        token, next_path = "", "/"
        access = door.access
        try:
            form = form_of(await request.body())
            token, next_path = form.get("token", "").strip(), _own_path(form.get("next"))
            if access is None or not access.on:
                return RedirectResponse(next_path, 303)
            await access.principal(b"Bearer " + token.encode(), None)
        except NotifyError as error:
            return page("login.html", request, error.status, title="Sign in", refused=str(error), next=next_path)
        answer = RedirectResponse(next_path, 303, SECURITY)
        is_tls = request.scope["scheme"] == "https" or _comes_through_tls(request, door.settings)
        answer.set_cookie(
            COOKIE, token, max_age=SIGNED_IN_SECONDS, httponly=True, samesite="strict", secure=is_tls, path="/"
        )
        return answer

    @routes.post("/logout", response_model=None)
    async def logout() -> Response:
        answer = RedirectResponse("/login", 303, SECURITY)
        answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return answer


def _comes_through_tls(request: Request, settings: Settings) -> bool:
    """Whether a proxy ends TLS before the server, by the setting `url`, or with `plaintext` by the proxy's header."""
    protocol = request.headers.get("x-forwarded-proto", "")
    return settings.url.startswith("https://") or (settings.plaintext and protocol.strip().lower() == "https")


def _own_path(text: str | None) -> str:
    """`text` if it is a path of this server, else `/`, so that signing in never redirects to another site."""
    return text if text and re.fullmatch(r"/[A-Za-z0-9._~%/-]*", text) and not text.startswith("//") else "/"
