"""Renders a page of the console from its template; and the headers that keep other sites from using it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2

from notify import __version__
from notify.admin_api.writes import FORMS, in_short
from notify.server.console import filters

HERE = Path(__file__).parent
SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}

NAVIGATION = (
    ("Messages", (("/", "Overview"), ("/groups", "Groups"), ("/dead-letters", "Dead letters"),
                  ("/transactions", "Transactions"), ("/messages", "Messages"), ("/topics", "Topics"),
                  ("/schedules", "Schedules"))),
    ("Operation", (("/nodes", "Nodes"), ("/audits", "Audits"), ("/jobs", "Jobs"))),
    ("Administration", (("/settings", "Settings"), ("/access", "Access"), ("/actions", "Audit log"))),
)  # fmt: skip
"""The groups of the menu, each with the addresses and names of its pages."""
_COUNTED = {
    "/dead-letters": ("dead_letters", "dead letter", "dead letters"),
    "/nodes": ("refused", "refused transaction", "refused transactions"),
}  # fmt: skip
"""Pages whose entries in the menu have a count: what is counted, and its name for one and for several."""
_LISTS = {target: label for _, pages in NAVIGATION for target, label in pages}

LIVE = {
    "overview.html": 3, "transactions.html": 5, "transaction.html": 5, "message.html": 5, "topics.html": 5,
    "topic.html": 5, "groups.html": 5, "group.html": 3, "dead_letter_groups.html": 5, "dead_letters.html": 10,
    "held_keys.html": 5, "schedules.html": 5, "schedule.html": 5,
    "nodes.html": 5, "jobs.html": 3, "job.html": 1,
}  # fmt: skip
"""Pages that refresh themselves, and after how many seconds."""

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= filters.FILTERS
_templates.globals |= {"navigation": NAVIGATION, "version": __version__, "changes": FORMS, "in_short": in_short}


def change_url(name: str, /, **targets: Any) -> str:
    """The address of a write's form; `targets` fill in its fields."""
    fields = {k: v for k, v in targets.items() if v is not None}
    return f"/do/{name}" + ("?" + urlencode(fields) if fields else "")


_templates.globals["do"] = change_url
for _first in ("base.html", "parts.html", "overview.html"):
    _templates.get_template(_first)  # compiled here, so that the first page after a start does not wait for it


def rendered(template: str, path: str, who: str, query: Mapping[str, str], **values: Any) -> str:
    """The text of a page at `path`, for the principal of the name `who`."""
    values.setdefault("live", LIVE.get(template, 0))
    values.setdefault("host", "")
    values.setdefault("may", lambda *_, **__: False)
    values.setdefault("prefix", "")
    now = datetime.now(UTC).isoformat()
    status = values.setdefault("status", None)
    menu = {} if status is None else menu_counts(status)
    text = _templates.get_template(template).render(
        path=path, now=now, query=query, who=who, trail=_trail(path), menu=menu, **values
    )
    return under(values["prefix"], text) if values["prefix"] else text


_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){1,8}\Z")


def prefix_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The path that a proxy removes from the addresses of this server, as its header `X-Forwarded-Prefix` says; mostly
    empty. A browser that sends the header itself gets odd links, and nobody else does: no page is kept."""
    for name, value in headers:
        if name == b"x-forwarded-prefix":
            text = value.decode("latin-1").strip().rstrip("/")
            return text if _PREFIX.match(text) else ""
    return ""


_OWN_ADDRESS = re.compile(r' (href|src|action|formaction|data-source)="/')


def under(prefix: str, text: str) -> str:
    """A page whose addresses begin with the path that a proxy removes. Texts of users have no quotes: these are
    escaped."""
    return _OWN_ADDRESS.sub(rf' \1="{prefix}/', text)


def menu_counts(status: Mapping[str, Any]) -> dict[str, tuple[int, str, str]]:
    """For entries of the menu how many, of what, and how bad that is, from the admin route's answer; entries without
    anything that waits are left out."""
    alarms, waiting = status["alarms"], status["waiting"]
    parked = waiting.get("parked", 0)
    of_groups = [alarm for alarm in alarms if filters.group_of(alarm)]

    def worst(some: Iterable[Mapping[str, Any]]) -> str:
        return "bad" if any(alarm["severity"] == "critical" for alarm in some) else "warn"

    counts = {
        "/": (len(alarms), "alarm", "alarms", worst(alarms)),
        "/groups": (
            len({filters.group_of(alarm) for alarm in of_groups}),
            "group with an alarm", "groups with alarms", worst(of_groups),
        ),
        "/transactions": (
            waiting.get("in_doubt", 0) + parked,
            "transaction without an outcome", "transactions without an outcome", "bad" * bool(parked),
        ),
    }  # fmt: skip
    counts |= {page: (waiting.get(name, 0), one, several, "warn") for page, (name, one, several) in _COUNTED.items()}
    return {page: (n, one if n == 1 else several, mood) for page, (n, one, several, mood) in counts.items() if n}


def _trail(path: str) -> list[tuple[str, str]]:
    """The pages above a page, as addresses and names: the list that leads to it, and what it is a part of."""
    first, *rest = path.strip("/").split("/")
    above = [(f"/{first}", _LISTS[f"/{first}"])] if rest and f"/{first}" in _LISTS else []
    if above and len(rest) == 2:
        above.append((f"/{first}/{quote(rest[0], safe='')}", rest[0]))
    return above
