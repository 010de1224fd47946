"""The console's routes: pages, forms, and signing in."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from notify.errors import NotifyError
from notify.server.access.guard import Door
from notify.server.console import forms, signing_in
from notify.server.console.api import Api, path_of
from notify.server.console.pages import PAGES, Page
from notify.server.console.rendering import SECURITY, failed, page

HISTORIES = {
    "/overview/history": "history",
    "/topics/{topic}/history": "topics/{topic}/history",
    "/groups/{group}/history": "groups/{group}/history",
}
"""The admin route of each page's charts."""


def router(api: ASGIApp, door: Door) -> APIRouter:
    """All pages. `api` serves the admin routes that the pages call; `door` verifies tokens."""
    routes = APIRouter(include_in_schema=False)

    def add(path: str, template: str, title: str, ask: Page) -> None:
        async def serve(request: Request) -> Response:
            try:
                values = await ask(Api(api, request), request)
            except NotifyError as error:
                return failed(request, error)
            return page(template, request, 200, **({"title": title} | values))

        routes.add_api_route(path, serve, methods=["GET"], response_model=None)

    for path, template, title, ask in PAGES:
        add(path, template, title, ask)
    signing_in.add_routes(routes, door)
    forms.add_routes(routes, api)

    def add_history(path: str, template: str) -> None:
        async def history(request: Request, span: str = "hour") -> Response:
            try:
                figures = await Api(api, request).get(path_of(template, **request.path_params), span=span)
            except NotifyError as error:
                return JSONResponse({"detail": str(error)}, error.status)
            return JSONResponse(figures, headers=SECURITY)

        routes.add_api_route(path, history, methods=["GET"], response_model=None)

    for path, template in HISTORIES.items():
        add_history(path, template)

    @routes.get("/audits/{number}/report", response_model=None)
    async def report(number: int) -> Response:
        return RedirectResponse(f"/v1/admin/audits/{number}/report", 303)

    return routes
