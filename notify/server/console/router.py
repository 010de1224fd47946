"""The console's routes: pages, forms, and signing in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from notify.errors import NotifyError
from notify.server.access.guard import COOKIE, Door
from notify.server.console import forms
from notify.server.console.api import Api, path_of, status_of
from notify.server.console.forms import form_of
from notify.server.console.open_pages import login_page, own_path
from notify.server.console.pages import PAGES, Page, found
from notify.server.console.rendering import SECURITY, prefix_of
from notify.server.console.responses import failed, page, redirect
from notify.server.settings import Settings

SIGNED_IN_SECONDS = 12 * 3600
SIGN_IN_FIELDS = 16
MOST_NAMES = 50
"""The most names that a field offers."""


def _add_signing_in(routes: APIRouter, door: Callable[[], Door]) -> None:
    """Add the routes for signing in and out; `door` returns what verifies tokens. The page itself is an open page."""

    @routes.post("/login", response_model=None)
    async def signed_in(request: Request) -> Response:
        token, next_path = "", "/"
        access = door().access
        try:
            form = form_of(await request.body(), SIGN_IN_FIELDS)
            token, next_path = form.get("token", "").strip(), own_path(form.get("next", ""))
            if access is None or not access.on:
                return redirect(request, next_path)
            await access.principal(b"Bearer " + token.encode(), None)
        except NotifyError as error:
            body = login_page(next_path, str(error), prefix_of(request.scope["headers"]))
            return HTMLResponse(body, error.status, SECURITY)
        answer = redirect(request, next_path)
        is_tls = request.scope["scheme"] == "https" or _comes_through_tls(request, door().settings)
        answer.set_cookie(
            COOKIE, token, max_age=SIGNED_IN_SECONDS, httponly=True, samesite="strict", secure=is_tls,
            path=_cookie_path(request),
        )  # fmt: skip
        return answer

    @routes.post("/logout", response_model=None)
    async def logout(request: Request) -> Response:
        answer = redirect(request, "/login")
        answer.delete_cookie(COOKIE, path=_cookie_path(request), httponly=True, samesite="strict")
        return answer


def _cookie_path(request: Request) -> str:
    """Two servers under one name, each with its prefix, have a cookie each."""
    return prefix_of(request.scope["headers"]) or "/"


def _comes_through_tls(request: Request, settings: Settings) -> bool:
    """Whether a proxy ends TLS before the server, by the setting `url`, or with `plaintext` by the proxy's header."""
    protocol = request.headers.get("x-forwarded-proto", "")
    return settings.url.startswith("https://") or (settings.plaintext and protocol.strip().lower() == "https")


def _address(request: Request, settings: Settings) -> str:
    """The server's address for clients: the setting `url`, else the one that the browser uses."""
    if settings.url:
        return settings.url.rstrip("/").removesuffix(f"/{settings.shard}")  # any worker takes a first message
    base = request.base_url
    own = str(base.replace(scheme="https") if _comes_through_tls(request, settings) else base).rstrip("/")
    return own + prefix_of(request.scope["headers"])


HISTORIES = {
    "/overview/history": "history",
    "/topics/{topic}/history": "topics/{topic}/history",
    "/groups/{group}/history": "groups/{group}/history",
}
"""The admin route of each page's charts."""


def router(api: ASGIApp, door: Callable[[], Door]) -> APIRouter:
    """All pages. `api` serves the admin routes that the pages call; `door` returns what verifies tokens."""
    routes = APIRouter(include_in_schema=False)

    def add(path: str, template: str, title: str, ask: Page) -> None:
        async def serve(request: Request) -> Response:
            try:
                asked = Api(api, request)
                values, status = await asyncio.gather(ask(asked, request), status_of(asked))
            except NotifyError as error:
                return failed(request, error)
            known = {"title": title, "status": status, "address": _address(request, door().settings)}
            return page(template, request, 200, **(known | values))

        routes.add_api_route(path, serve, methods=["GET"], response_model=None)

    for path, template, title, ask in PAGES:
        add(path, template, title, ask)
    _add_signing_in(routes, door)
    forms.add_routes(routes, api)

    def add_history(path: str, template: str) -> None:
        async def history(request: Request, span: str = "hour") -> Response:
            try:
                figures = await Api(api, request).get(path_of(template, **request.path_params), span=span)
            except NotifyError as error:
                return JSONResponse({"detail": str(error)}, error.status, SECURITY)
            return JSONResponse(figures, headers=SECURITY)

        routes.add_api_route(path, history, methods=["GET"], response_model=None)

    for path, template in HISTORIES.items():
        add_history(path, template)

    @routes.get("/names/{kind}", response_model=None)
    async def names(request: Request, kind: Literal["topics", "groups", "schedules"], q: str = "") -> Response:
        """The first names that begin with what a person has typed into a field."""
        try:
            rows = (await Api(api, request).get(kind, prefix=q.strip(), internal="false", max=MOST_NAMES))[kind]
        except NotifyError as error:
            return JSONResponse({"detail": str(error)}, error.status, SECURITY)
        return JSONResponse([row["name"] for row in rows], headers=SECURITY)

    @routes.get("/find", response_model=None)
    async def find(request: Request, q: str = "") -> Response:
        try:
            target = await found(Api(api, request), q.strip()) if q.strip() else "/messages"
        except NotifyError as error:
            return failed(request, error)
        return redirect(request, target)

    @routes.get("/audits/{number}/report", response_model=None)
    async def report(request: Request, number: int) -> Response:
        return redirect(request, f"/v1/admin/audits/{number}/report")

    return routes
