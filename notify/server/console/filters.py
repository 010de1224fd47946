"""Filters of the templates: they format times, ids and bodies for a page."""

from __future__ import annotations

import base64
import functools
import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from notify.admin_api.queue_rows import kept, sent, state
from notify.admin_api.words import (
    count,
    describe_body,
    duration,
    exactly,
    job,
    latency,
    percent,
    setting,
    size,
    status,
    whole,
)

BODY_CHARACTERS = 20_000
LINE_CHARACTERS = 120


MINUTE_SECONDS, DAY_SECONDS = 60.0, 86_400.0


def moment(text: str | None) -> str:
    """An RFC 3339 instant as the time since or until then, from a day on as a date; its title has the full instant."""
    if not text:
        return "–"
    ago = time.time() - datetime.fromisoformat(text).timestamp()
    words = exactly(text)[:16] if abs(ago) >= DAY_SECONDS else f"{whole(ago)} ago" if ago >= 0 else f"in {whole(-ago)}"
    full = text[:23].rstrip("Z").replace("T", " ") + " UTC"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(text, full, words)


def clock(text: str) -> Markup:
    """An RFC 3339 instant as its time of day in UTC, to the millisecond; its title has the full instant."""
    full = text[:23].rstrip("Z").replace("T", " ") + " UTC"
    return Markup('<time datetime="{}" title="{}" class="clock">{}</time>').format(text, full, full[11:-4])


def after(text: str, first: str) -> str:
    """The time from the instant `first` to the instant `text`."""
    seconds = (datetime.fromisoformat(text) - datetime.fromisoformat(first)).total_seconds()
    return f"+{seconds * 1000:.0f} ms" if seconds < 1 else f"+{duration(seconds)}"


def due(text: str | None) -> str:
    """An instant in words; a past instant as `due for` a time."""
    if text and datetime.fromisoformat(text).timestamp() <= time.time():
        return Markup("due for ") + Markup(str(moment(text)).replace(" ago", ""))
    return moment(text)


ENDS = 8, 12
"""How many characters of an id's beginning and end are shown: ids of the same moment have the same beginning."""


def short(name: str) -> str:
    """An id shortened for a table's column; its title and its copy button have the full id."""
    first, last = ENDS
    return name if len(name) <= first + last + 4 else f"{name[:first]}…{name[-last:]}"


def field(text: str) -> str:
    """An instant as the value of a browser's date and time field."""
    return text[:19].rstrip("Z")


def body(message: dict[str, Any]) -> str:
    """A message's body: JSON is indented, text is unchanged, bytes are hexadecimal. Of a body that lies in a store, or
    is compressed, a sentence."""
    outside = describe_body(message)
    if outside:
        return outside
    if "body_base64" in message:
        raw = base64.b64decode(message["body_base64"])
        return raw[: BODY_CHARACTERS // 3].hex(" ")
    text = str(message.get("body", ""))
    if (
        text[:1] in ("{", "[") and len(text) <= BODY_CHARACTERS
    ):  # indented, a larger one could have a thousand times more
        try:
            indented = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            indented.encode()  # raises for half of a surrogate pair, which no page can have
            text = indented
        except (ValueError, RecursionError):
            pass  # the text begins like JSON, but is not JSON
    return text[:BODY_CHARACTERS]


def line(message: dict[str, Any]) -> str:
    """The beginning of a message's body, in one line."""
    outside = describe_body(message)
    if outside:
        return outside[:LINE_CHARACTERS]
    if "body_base64" in message:
        return body(message)[:LINE_CHARACTERS]
    return " ".join(str(message.get("body", ""))[: 4 * LINE_CHARACTERS].split())[:LINE_CHARACTERS]


def breakable(text: str) -> Markup:
    """A text in which a browser may break long names, after dots and slashes only."""
    return Markup(re.sub(r"(?<=[./])(?=\w)", "<wbr>", str(escape(text))))


def plain(value: Any) -> str:
    """An answer as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)[:BODY_CHARACTERS]


def marked(text: str) -> Markup:
    """A setting's paragraph as HTML: text in backticks is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def percentiles(kind: str) -> list[tuple[str, str, str]]:
    """The lines of a chart of a kind of latency."""
    return [(f"{kind}_{share}", f"{kind.replace('_', ' ')} {share}", "time") for share in ("p50", "p95", "p99")]


_PAGES = {
    "in_doubt": "/transactions?producer_group={}", "parked": "/transactions?state=PARKED", "no_consumers": "/groups/{}",
    "push": "/groups/{}", "objective": "/groups/{}",
    "lag_growing": "/groups/{}", "dead_letters": "/groups/{}/dead-letters", "consumers": "/groups/{}",
    "held_keys": "/groups/{}/held-keys", "held_up": "/groups/{}/held-keys",
    "unread_topic": "/groups/{}", "filter": "/groups/{}",
    "bridge": "/nodes", "retained_log": "/nodes", "old_slot": "/nodes", "refused": "/nodes",
    "left_behind": "/nodes", "schedule": "/schedules", "audit": "/audits", "credential": "/access", "kafka": "/nodes",
}  # fmt: skip


_OF_A_TOPIC = {"unread_topic", "filter"}
"""Alarms whose target is a group and its topic."""


def together(alarms: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Alarms by kind; the kinds stay in the order of their first alarms."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for alarm in alarms:
        kinds.setdefault(alarm["name"], []).append(alarm)
    return list(kinds.values())


TREND_SECONDS = 600.0
"""How old the figure is that a trend compares with."""
LEAST_TREND = 0.05
"""A figure that changes by a smaller share of itself is called steady."""


def trend(now: float | None, history: dict[str, Any], name: str, shown: str = "count") -> str:
    """How a figure has changed in ten minutes, or since there are figures, such as `10 min ago 1,436: it grows`;
    empty if that is unknown, or if it was and is 0. `shown`: the filter that formats it."""
    earlier = [(at, value) for at, value in zip(history["at"], history[name], strict=True) if value is not None]
    if now is None or not earlier:
        return ""
    since = time.time() - TREND_SECONDS
    at, before = next(((at, value) for at, value in reversed(earlier) if at <= since), earlier[0])
    if time.time() - at < 2 * MINUTE_SECONDS or now == before == 0:
        return ""
    return f"{whole(time.time() - at)} ago {FILTERS[shown](before)}: it {_changed(now - before, max(now, before))}"


def _changed(difference: float, size: float) -> str:
    return "is steady" if abs(difference) <= LEAST_TREND * size else "grows" if difference > 0 else "shrinks"


def way(group: dict[str, Any]) -> str:
    """Whether a group's lag `grows` or `shrinks`, by the rates of the last minute; empty if it does neither, or if that
    is unknown."""
    lag, arrived, settled = (group.get(name) for name in ("lag", "arrived_per_second", "settled_per_second"))
    if not lag or arrived is None or settled is None:
        return ""
    changed = _changed((arrived - settled) * TREND_SECONDS, lag)
    return "" if changed == "is steady" else changed


def page_of(alarm: dict[str, Any]) -> str:
    """The page on which an operator handles an alarm; empty if there is no such page."""
    return _PAGES.get(alarm["name"], "").format(quote(group_of(alarm) or str(alarm["target"]), safe=""))


def group_of(alarm: dict[str, Any]) -> str:
    """The consumer group that an alarm is about; empty if it is about something else."""
    name, target = alarm["name"], str(alarm["target"])
    if name != "kafka" and not _PAGES.get(name, "").startswith("/groups/"):
        return ""
    return target.partition("/")[0] if name in _OF_A_TOPIC else target


def _total(show: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that shows as text what it cannot format: one odd value, such as one that an older version stored, must
    not take the whole page away."""

    @functools.wraps(show)
    def shown(value: Any, *others: Any) -> Any:
        try:
            return show(value, *others)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return str(value)[:LINE_CHARACTERS]

    return shown


_FILTERS: dict[str, Callable[..., Any]] = {
    "count": count,
    "duration": duration,
    "latency": latency,
    "percent": percent,
    "percentiles": percentiles,
    "size": size,
    "moment": moment,
    "exactly": exactly,
    "short": short,
    "field": field,
    "page_of": page_of,
    "together": together,
    "trend": trend,
    "way": way,
    "status": status,
    "setting": setting,
    "body": body,
    "line": line,
    "breakable": breakable,
    "clock": clock,
    "after": after,
    "due": due,
    "job": job,
    "kept": kept,
    "sent": sent,
    "state": state,
    "plain": plain,
    "marked": marked,
}
FILTERS = {name: _total(show) for name, show in _FILTERS.items()}
