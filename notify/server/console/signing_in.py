"""Signing in with a token, which the browser stores in a cookie, and signing out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from notify.errors import NotifyError
from notify.server.access.guard import COOKIE, Door
from notify.server.console.forms import form_of
from notify.server.console.open_pages import login_page, own_path
from notify.server.console.rendering import SECURITY
from notify.server.settings import Settings

SIGNED_IN_SECONDS = 12 * 3600
SIGN_IN_FIELDS = 16


def add_routes(routes: APIRouter, door: Door) -> None:
    """Add the routes for signing in and out; `door` verifies tokens. The page to sign in is one of the open pages."""

    @routes.post("/login", response_model=None)
    async def signed_in(request: Request) -> Response:
        token, next_path = "", "/"
        access = door.access
        try:
            form = form_of(await request.body(), SIGN_IN_FIELDS)
            token, next_path = form.get("token", "").strip(), own_path(form.get("next", ""))
            if access is None or not access.on:
                return RedirectResponse(next_path, 303)
            await access.principal(b"Bearer " + token.encode(), None)
        except NotifyError as error:
            return HTMLResponse(login_page(next_path, str(error)), error.status, SECURITY)
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
