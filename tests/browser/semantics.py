"""Faults of a page as a screen reader gets it, in Chromium's own tree of it (`Accessibility.getFullAXTree`)."""

from __future__ import annotations

import re
from typing import Any

CONTROLS = frozenset(
    {"button", "link", "textbox", "searchbox", "checkbox", "radio", "combobox", "spinbutton", "slider", "listbox",
     "DisclosureTriangle", "progressbar", "image", "img", "region", "group", "navigation", "table"}
)  # fmt: skip
"""Roles that a screen reader announces with a name, and lists by it."""
GROUPS_WITHOUT_NAME = frozenset({"group", "table"})
"""These need no name of their own: a `details` is a group, and a table stands below its heading."""
MOVES = re.compile(r"\b\d+ (s|min|h|d)\b")
"""Text that changes by itself as time goes by."""

FROM_THE_PAGE = r"""() => {
  const wrong = [];
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.getAttribute("id"));
  for (const id of new Set(ids.filter((id, n) => ids.indexOf(id) !== n))) wrong.push(`two elements have the id ${id}`);
  for (const e of document.querySelectorAll("[aria-describedby], [aria-labelledby]")) {
    const named = `${e.getAttribute("aria-describedby") || ""} ${e.getAttribute("aria-labelledby") || ""}`;
    for (const id of named.split(" ").filter(Boolean)) {
      if (!document.getElementById(id)) wrong.push(`${e.tagName} refers to #${id}, which is not there`);
    }
  }
  for (const e of document.querySelectorAll("th:not(.chart th)")) {
    if (!e.getAttribute("scope")) wrong.push(`a heading of a table has no scope: ${e.textContent.trim()}`);
    if (!e.textContent.trim()) wrong.push("a heading of a table is empty");
  }
  for (const e of document.querySelectorAll("table:not(.chart table)")) {
    if (!e.querySelector("th")) wrong.push("a table has no headings");
  }
  const plain = (text) => text.trim().replace(/\s+/g, " ").toLowerCase();
  for (const e of document.querySelectorAll("a[aria-label], button[aria-label]")) {
    const seen = plain(e.textContent);
    if (!plain(e.ariaLabel).includes(seen)) wrong.push(`${e.ariaLabel} is not what is seen: ${seen}`);
  }
  if (document.documentElement.lang !== "en") wrong.push("the page does not say its language");
  return wrong;
}"""
"""Faults that the tree does not show: ids, references, and scopes of headings."""

ANNOUNCED = """() => [...document.querySelectorAll("[aria-live], [role=status], [role=alert], [role=log]")]
  .map((e) => [e.getAttribute("role") || e.getAttribute("aria-live"), e.checkVisibility(), e.textContent.trim(),
               Boolean(e.querySelector("time"))])"""


def value(node: dict[str, Any], field: str) -> str:
    return str(node.get(field, {}).get("value", "")).strip()


def properties(node: dict[str, Any]) -> dict[str, Any]:
    return {p["name"]: p["value"].get("value") for p in node.get("properties", ())}


def tree_of(w: Any) -> list[dict[str, Any]]:
    """The nodes of the page that a screen reader gets, in order."""
    session = w.page.context.new_cdp_session(w.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    by_id = {node["nodeId"]: node for node in nodes}
    ordered: list[dict[str, Any]] = []

    def walk(node: dict[str, Any]) -> None:
        if not node["ignored"]:
            ordered.append(node)
        for child in node.get("childIds", ()):
            if child in by_id:
                walk(by_id[child])

    walk(nodes[0])
    return ordered


def unnamed(nodes: list[dict[str, Any]]) -> list[str]:
    """Controls and regions without a name, and what takes the focus without one."""
    wrong = []
    for node in nodes:
        role, name = value(node, "role"), value(node, "name")
        says_so = role in CONTROLS - GROUPS_WITHOUT_NAME
        takes_focus = bool(properties(node).get("focusable")) and role not in ("RootWebArea", "main")
        if not name and (says_so or takes_focus):
            wrong.append(f"{role} has no name")
    return wrong


def disordered(nodes: list[dict[str, Any]]) -> list[str]:
    """Headings that are not one `h1` and below it no level left out."""
    levels = [(int(properties(n)["level"]), value(n, "name")) for n in nodes if value(n, "role") == "heading"]
    wrong = [] if [level for level, _ in levels].count(1) == 1 else [f"headings of level 1: {levels}"]
    before = 0
    for level, name in levels:
        if level > before + 1:
            wrong.append(f"heading {name!r} of level {level} comes behind level {before}")
        if not name:
            wrong.append(f"a heading of level {level} is empty")
        before = level
    return wrong


def landmarks(nodes: list[dict[str, Any]], is_login: bool) -> list[str]:
    names = [(value(n, "role"), value(n, "name")) for n in nodes]
    wrong = [] if [role for role, _ in names].count("main") == 1 else ["there is not one main landmark"]
    menus = [name for role, name in names if role == "navigation"]
    if not is_login and "Main" not in menus:
        wrong.append("the menu is no landmark")
    places = [pair for pair in names if pair[0] in ("navigation", "region")]
    wrong += [f"two landmarks are called alike: {pair}" for pair in {p for p in places if places.count(p) > 1}]
    return wrong


def alike(w: Any) -> list[str]:
    """Links of one name that lead to different places: in a list of links nobody can tell them apart."""
    links = w.page.evaluate(
        """() => [...document.querySelectorAll("main a[href]")].filter((e) => e.checkVisibility())
             .map((e) => [(e.ariaLabel || e.textContent).trim().replace(/\\s+/g, " "), e.getAttribute("href")])"""
    )
    targets: dict[str, set[str]] = {}
    for name, target in links:
        targets.setdefault(name, set()).add(re.sub(r"stored_before=[^&]*", "", target))
    return [f"link {name!r} leads to {sorted(to)[:3]}" for name, to in targets.items() if len(to) > 1]


def chatty(w: Any) -> list[str]:
    """Announcements without need: of what time alone changes, and an alert where nothing failed."""
    wrong = []
    for role, is_visible, text, has_time in w.page.evaluate(ANNOUNCED):
        if has_time or MOVES.search(text):
            wrong.append(f"{role} is announced again and again: {text[:80]!r}")
        if role in ("alert", "assertive") and is_visible and w.page.locator("main .bad").count() == 0:
            wrong.append(f"an alert without a failure: {text[:80]!r}")
    return wrong


def wrong_with(w: Any, is_login: bool = False) -> list[str]:
    nodes = tree_of(w)
    found = unnamed(nodes) + disordered(nodes) + landmarks(nodes, is_login) + alike(w) + chatty(w)
    return found + list(w.page.evaluate(FROM_THE_PAGE))
