"""The console's pages: each asks the admin routes and fills a template."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import jinja2
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from notify import __version__
from notify.errors import InvalidRequest, NotFound, NotifyError, TooLarge, Unauthorized
from notify.server.access import EVERYONE
from notify.server.access.guard import COOKIE, Door
from notify.server.console import shown
from notify.server.console.api import Api, path_of
from notify.server.console.writes import CHANGES, Change, Input
from notify.settings import Settings
from notify.storage.names import dead_letter_topic

HERE = Path(__file__).parent
ROWS = 100
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
SIGNED_IN_SECONDS = 12 * 3600
FORM_FIELDS = 5000
Page = Callable[[Api, Request], Awaitable[dict[str, Any]]]

NAVIGATION = (
    ("/", "Overview"),
    ("/transactions", "Transactions"),
    ("/messages", "Messages"),
    ("/topics", "Topics"),
    ("/groups", "Groups"),
    ("/dead-letters", "Dead letters"),
    ("/nodes", "Nodes"),
    ("/audits", "Audits"),
    ("/jobs", "Jobs"),
    ("/settings", "Settings"),
    ("/access", "Access"),
    ("/actions", "Who did what"),
)

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= shown.FILTERS
_templates.globals |= {"navigation": NAVIGATION, "version": __version__, "changes": CHANGES}


def change_url(name: str, **targets: Any) -> str:
    """Where a write's form is, with what is known filled in."""
    given = {k: v for k, v in targets.items() if v is not None}
    return f"/do/{name}" + ("?" + urlencode(given) if given else "")


_templates.globals["do"] = change_url


def _page(template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    principal = request.state.principal
    text = _templates.get_template(template).render(
        path=request.scope["path"],
        query=dict(request.query_params),
        who="" if principal is EVERYONE else principal.name,
        **values,
    )
    return HTMLResponse(text, status, SECURITY)


def failed(request: Request, error: NotifyError) -> Response:
    """A page that says what was refused and why; whoever is not signed in is asked to."""
    if isinstance(error, Unauthorized):
        return RedirectResponse("/login?" + urlencode({"next": request.scope["path"]}), 303, SECURITY)
    return _page("error.html", request, error.status, title="That did not work", error=error)


def static_files() -> StaticFiles:
    """Style, scripts and their licences, to be mounted at /static."""
    return StaticFiles(directory=HERE / "static")


def router(api: ASGIApp, door: Door) -> APIRouter:
    """All pages. `api` serves the admin routes that they ask, `door` says who may sign in."""
    routes = APIRouter(include_in_schema=False)

    def page(path: str, template: str, title: str, ask: Page) -> None:
        async def serve(request: Request) -> Response:
            try:
                values = await ask(Api(api, request), request)
            except NotifyError as error:
                return failed(request, error)
            return _page(template, request, 200, **({"title": title} | values))

        routes.add_api_route(path, serve, methods=["GET"], response_model=None)

    for path, template, title, ask in PAGES:
        page(path, template, title, ask)
    _signing_in(routes, door)
    _writes(routes, api)

    @routes.get("/overview/history", response_model=None)
    async def history(request: Request) -> Response:
        try:
            return JSONResponse(await Api(api, request).get("history"), headers=SECURITY)
        except NotifyError as error:
            return JSONResponse({"detail": str(error)}, error.status)

    @routes.get("/audits/{number}/report", response_model=None)
    async def report(number: int) -> Response:
        return RedirectResponse(f"/v1/admin/audits/{number}/report", 303)

    return routes


# --- signing in -----------------------------------------------------------------------------------------------


def _signing_in(routes: APIRouter, door: Door) -> None:
    @routes.get("/login", response_model=None)
    async def login(request: Request) -> Response:
        return _page(
            "login.html", request, title="Sign in", refused="", next=_own_path(request.query_params.get("next"))
        )

    @routes.post("/login", response_model=None)
    async def signed_in(request: Request) -> Response:
        token, then = "", "/"
        access = door.access
        try:
            form = _form(await request.body())
            token, then = form.get("token", "").strip(), _own_path(form.get("next"))
            if access is None or not access.on:
                return RedirectResponse(then, 303)
            await access.principal(b"Bearer " + token.encode(), None)
        except NotifyError as error:
            return _page("login.html", request, error.status, title="Sign in", refused=str(error), next=then)
        answer = RedirectResponse(then, 303, SECURITY)
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
    """Whether a proxy ends TLS before the server: the setting `url` says so, or the proxy, where there may be one."""
    said = request.headers.get("x-forwarded-proto", "")
    return settings.url.startswith("https://") or (settings.plaintext and said.strip().lower() == "https")


def _own_path(text: str | None) -> str:
    """A path of this server: nobody is sent elsewhere after signing in."""
    return text if text and re.fullmatch(r"/[A-Za-z0-9._~%/-]*", text) and not text.startswith("//") else "/"


def _form(body: bytes) -> dict[str, str]:
    """A posted form; of a name that comes more than once, the values by commas. Raises TooLarge for too many fields."""
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=FORM_FIELDS)
    except ValueError:
        raise TooLarge(f"a form has at most {FORM_FIELDS} fields") from None
    return {name: ",".join(values) for name, values in fields.items()}


# --- writes ---------------------------------------------------------------------------------------------------


def _writes(routes: APIRouter, api: ASGIApp) -> None:
    @routes.get("/do/{name}", response_model=None)
    async def form(request: Request, name: str) -> Response:
        try:
            given = _form(request.scope["query_string"])
            change = await _change(Api(api, request), name, given)
        except NotifyError as error:
            return failed(request, error)
        return _form_page(request, name, change, given)

    @routes.post("/do/{name}", response_model=None)
    async def carry_out(request: Request, name: str) -> Response:
        try:
            given = _form(await request.body())
        except NotifyError as error:
            return failed(request, error)
        asked = Api(api, request)
        is_preview = given.pop("step", "preview") != "do"
        try:
            change = await _change(asked, name, given)
        except NotifyError as error:
            return failed(request, error)
        targets = {target: given.get(target, "") for target in _targets(change)}
        try:
            answer = await _carried_out(asked, change, targets, given, is_preview)
        except NotifyError as error:
            return _form_page(request, name, change, given, refused=error)
        if is_preview:
            return _form_page(request, name, change, given, preview=answer)
        job = answer["result"].get("job") if isinstance(answer["result"], dict) else None
        back = change.back.format(**{k: quote(v, safe="") for k, v in targets.items()})
        back = back if job is None else f"/jobs/{job}"
        return _page("done.html", request, title=change.title, answer=answer, back=back)


async def _carried_out(
    api: Api, change: Change, targets: dict[str, str], given: dict[str, str], is_preview: bool
) -> dict[str, Any]:
    """The admin route's answer. Raises InvalidRequest for a form that lacks something, Refused."""
    missing = [name for name, value in targets.items() if not value]
    if missing:
        raise InvalidRequest(f"{', '.join(missing)} is missing")
    body = change.body(given) | {"reason": given.get("reason", ""), "dry_run": is_preview}
    return await api.call(change.method, path_of(change.path, **targets), body)


def _targets(change: Change) -> list[str]:
    return re.findall(r"\{(\w+)\}", change.path)


async def _change(api: Api, name: str, given: dict[str, str]) -> Change:
    """The write by this name. Raises NotFound. A setting's input is made from what the setting is."""
    change = CHANGES.get(name)
    if change is None:
        raise NotFound(f"there is no write {name[:60]!r}")
    if name != "settings.put":
        return change
    found = (await api.get("settings"))["settings"]
    wanted = given.get("setting", "")
    row = next((row for row in found if row["name"] == wanted and row["live"]), None)
    if row is None:
        raise NotFound(f"there is no setting {wanted[:60]!r} that may change while servers run")
    choices = ("true", "false") if row["type"] == "bool" else ()
    bound = f" From {row['low']:g} to {row['high']:g}." if row["low"] is not None else ""
    kind = "choice" if choices else "number" if row["type"] in ("int", "float") else "text"
    field = Input(row["name"], row["name"], kind, choices, help=row["doc"] + bound)
    return dataclasses.replace(change, title=f"Change {row['name']}", inputs=(field,))


def _form_page(
    request: Request,
    name: str,
    change: Change,
    given: dict[str, str],
    preview: dict[str, Any] | None = None,
    refused: NotifyError | None = None,
) -> Response:
    targets = {target: given.get(target, "") for target in _targets(change)}
    status = 200 if refused is None else refused.status
    return _page(
        "change.html", request, status, title=change.title, name=name, change=change, given=given, targets=targets,
        preview=preview, refused=refused,
    )  # fmt: skip


# --- pages ----------------------------------------------------------------------------------------------------


async def _overview(api: Api, request: Request) -> dict[str, Any]:
    return {"o": await api.get("overview")}


async def _transactions(api: Api, request: Request) -> dict[str, Any]:
    q = request.query_params
    found = await api.get(
        "transactions",
        state=q.get("state"),
        producer_group=q.get("producer_group"),
        older_than=q.get("older_than"),
        max=ROWS,
    )
    return {"transactions": found["transactions"], "rows": ROWS}


async def _transaction(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["transaction"]
    return {"title": f"Transaction {name}", "t": await api.get(path_of("transactions/{id}", id=name))}


async def _messages(api: Api, request: Request) -> dict[str, Any]:
    q = request.query_params
    asked = {name: q.get(name, "").strip() for name in ("id", "key", "topic", "from", "to")}
    if asked["id"]:
        return {"messages": None, "to_message": asked["id"], "asked": asked, "rows": ROWS}
    found = None
    if asked["key"] or asked["topic"]:
        found = (await api.get("messages", **asked, max=ROWS))["messages"]
    return {"messages": found, "asked": asked, "rows": ROWS, "to_message": ""}


async def _message(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["message"]
    return {"title": f"Message {name}", "m": await api.get(path_of("messages/{id}", id=name))}


def _listed(kind: str) -> Page:
    """Topics or groups by name, a page of them."""

    async def ask(api: Api, request: Request) -> dict[str, Any]:
        q = request.query_params
        return await api.get(kind, prefix=q.get("prefix"), after=q.get("after"), max=ROWS) | {"rows": ROWS}

    return ask


async def _topic(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["topic"]
    return {
        "title": f"Topic {name}",
        "t": await api.get(path_of("topics/{name}", name=name)),
        "groups": (await api.get(path_of("topics/{name}/groups", name=name)))["groups"],
    }


async def _group(api: Api, request: Request) -> dict[str, Any]:
    name = request.path_params["group"]
    return {
        "title": f"Group {name}",
        "g": await api.get(path_of("groups/{name}", name=name)),
        "priorities": await api.get(path_of("groups/{name}/priorities", name=name)),
    }


async def _dead_letter_groups(api: Api, request: Request) -> dict[str, Any]:
    q = request.query_params
    # The queues of dead letters are topics of the groups' names: those with something in them are worth a row.
    found = await api.get("topics", prefix=dead_letter_topic(q.get("prefix", "")), after=q.get("after"), max=10_000)
    first = dead_letter_topic("")
    rows = [
        {"group": t["name"].removeprefix(first), "count": sum(x["end"] - x["start"] for x in t["queues"])}
        for t in found["topics"]
    ]
    return {"groups": sorted((r for r in rows if r["count"]), key=lambda r: -r["count"])[:ROWS], "rows": ROWS}


async def _dead_letters(api: Api, request: Request) -> dict[str, Any]:
    name, q = request.path_params["group"], request.query_params
    asked = {field: q.get(field, "") for field in ("topic", "tag", "key", "contains", "filter")}
    found = await api.get(path_of("groups/{name}/dead-letters", name=name), **asked, offset=q.get("offset"), max=ROWS)
    return {"title": f"Dead letters of {name}", "group": name, "asked": asked, "found": found, "rows": ROWS}


async def _nodes(api: Api, request: Request) -> dict[str, Any]:
    try:
        bridges = (await api.get("bridges"))["bridges"]
    except NotifyError as error:
        if error.status != 421:
            raise
        bridges = None  # a server without queues has none
    return {"nodes": await api.get("nodes"), "bridges": bridges}


async def _audits(api: Api, request: Request) -> dict[str, Any]:
    return {"audits": (await api.get("audits"))["audits"]}


async def _jobs(api: Api, request: Request) -> dict[str, Any]:
    return {"jobs": (await api.get("jobs", max=ROWS))["jobs"]}


async def _job(api: Api, request: Request) -> dict[str, Any]:
    number = request.path_params["job"]
    return {"title": f"Job {number}", "job": await api.get(path_of("jobs/{id}", id=number), max=ROWS), "rows": ROWS}


async def _settings(api: Api, request: Request) -> dict[str, Any]:
    found = await api.get("settings")
    return {
        "settings": found["settings"],
        "revision": found["revision"],
        "revisions": (await api.get("settings/revisions", max=20))["revisions"],
        "limits": await api.get("limits"),
    }


async def _access(api: Api, request: Request) -> dict[str, Any]:
    return await api.get("credentials", all="true" if request.query_params.get("all") else None)


async def _actions(api: Api, request: Request) -> dict[str, Any]:
    q = request.query_params
    asked = {name: q.get(name, "") for name in ("what", "target")}
    found = await api.get("actions", **asked, before=q.get("before"), max=ROWS)
    return {"actions": found["actions"], "asked": asked, "rows": ROWS}


PAGES: tuple[tuple[str, str, str, Page], ...] = (
    ("/", "overview.html", "Overview", _overview),
    ("/transactions", "transactions.html", "Transactions in doubt", _transactions),
    ("/transactions/{transaction}", "transaction.html", "", _transaction),
    ("/messages", "messages.html", "Messages", _messages),
    ("/messages/{message}", "message.html", "", _message),
    ("/topics", "topics.html", "Topics", _listed("topics")),
    ("/topics/{topic}", "topic.html", "", _topic),
    ("/groups", "groups.html", "Consumer groups", _listed("groups")),
    ("/groups/{group}", "group.html", "", _group),
    ("/groups/{group}/dead-letters", "dead_letters.html", "", _dead_letters),
    ("/dead-letters", "dead_letter_groups.html", "Dead letters", _dead_letter_groups),
    ("/nodes", "nodes.html", "Nodes and bridges", _nodes),
    ("/audits", "audits.html", "Audits", _audits),
    ("/jobs", "jobs.html", "Jobs", _jobs),
    ("/jobs/{job}", "job.html", "", _job),
    ("/settings", "settings.html", "Settings and limits", _settings),
    ("/access", "access.html", "Access", _access),
    ("/actions", "actions.html", "Who did what", _actions),
)
