"""Lists of the console: a row is a line, keys lead from row to row, and a bar appears with a selection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.browser.window import CUT_HEADINGS
from tests.support.groups import Caller, publish, subscribe

TOPIC, GROUP = "order.placed", "points"
LETTERS = 100
LONG_TOPIC = "customer.points.recalculated"
LISTS = (f"/groups/{GROUP}/dead-letters", f"/messages?topic={TOPIC}", "/topics", "/actions")
CAUSES = ("sqlalchemy.exc.OperationalError", "KeyError", "TimeoutError")
REASON = "{}: connection to the database of the loyalty programme was refused, attempt {}"
CUT_NAMES = """[...document.querySelectorAll("table.rows td:first-child")]
  .filter((name) => name.scrollWidth > name.clientWidth).map((name) => name.innerText)"""
HIDDEN_BODIES = """() => [...document.querySelectorAll("table.rows code.summary")].slice(0, 3).filter((body) => {
  const first = document.createRange();
  first.setStart(body.firstChild, 0);
  first.setEnd(body.firstChild, 1);
  const place = first.getBoundingClientRect();
  return document.elementFromPoint(place.x + place.width / 2, place.y + place.height / 2) !== body;
}).map((body) => body.innerText)"""
"""Bodies at the top of a list whose first character is not where the browser shows it."""
HIGHEST = 2600
"""The most pixels that a page with 100 rows is high, in a window of 1,280 pixels."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose group has a hundred dead letters of three causes, each with a long reason and a long body."""
    process = ServerProcess(tmp_path_factory.mktemp("lists") / "data").start()
    subscribe(process.url, GROUP, TOPIC)
    publish(process.url, LONG_TOPIC, ["x"])
    publish(process.url, TOPIC, [f"{n} " + "a long body " * 40 for n in range(LETTERS)])
    caller = Caller(process.url, GROUP, "points-1")
    for n in range(LETTERS):
        caller.settle(caller.receive(TOPIC, wait=30, max=1), "dead_letter", reason=REASON.format(CAUSES[n % 3], n))
    yield process
    process.stop()


@pytest.mark.long
@pytest.mark.parametrize("path", LISTS)
def test_a_row_is_a_line(server: ServerProcess, window: Any, path: str) -> None:
    w = window(server.url)
    w.go(path)
    heights = w.page.evaluate("[...document.querySelectorAll('table.rows tbody tr')].map((row) => row.offsetHeight)")
    assert heights and max(heights) <= 24, heights
    assert w.page.evaluate("document.documentElement.scrollHeight") <= HIGHEST
    assert w.page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert w.page.evaluate(CUT_HEADINGS) == []
    assert w.page.evaluate(CUT_NAMES) == [], "names of topics were cut beside columns of short numbers"
    assert w.page.evaluate(HIDDEN_BODIES) == [], "of a body only an ellipsis was shown"


@pytest.mark.long
def test_keys_lead_from_row_to_row_and_the_row_with_the_focus_is_shown_whole(
    server: ServerProcess, window: Any
) -> None:
    w = window(server.url)
    w.go(LISTS[0])
    rows = w.page.locator("table.rows tbody tr")
    for _ in range(len(CAUSES) + 2):
        w.page.keyboard.press("j")
    w.page.keyboard.press("k")
    first = rows.nth(len(CAUSES))  # the rows of the causes come before it
    assert first.locator("a").first.evaluate("link => link === document.activeElement")
    assert first.evaluate("row => row.offsetHeight") > rows.nth(0).evaluate("row => row.offsetHeight")
    assert (
        w.page.locator("th:text-is('Why')").evaluate(
            "head => { scrollTo(0, 9999); return head.getBoundingClientRect().top; }"
        )
        == 0
    )
    name = first.get_attribute("data-key")
    w.page.keyboard.press("Enter")
    w.page.wait_for_url(f"**/messages/{name}")
    w.go(LISTS[0])
    w.page.fill("input[name=contains]", "")
    w.page.keyboard.type("jk")
    assert w.page.input_value("input[name=contains]") == "jk"


@pytest.mark.long
def test_a_bar_appears_with_a_selection(server: ServerProcess, window: Any) -> None:
    w = window(server.url)
    w.go(LISTS[0])
    bar = w.page.locator(".bulk")
    assert not bar.is_visible()
    boxes = w.page.locator("input[name=ids]")
    boxes.nth(0).check()
    boxes.nth(99).check()
    assert bar.is_visible() and "2 selected" in bar.inner_text()
    boxes.nth(0).uncheck()
    boxes.nth(99).uncheck()
    assert not bar.is_visible()


@pytest.mark.long
def test_a_search_from_anywhere_leads_to_what_is_meant(server: ServerProcess, window: Any) -> None:
    w = window(server.url)
    w.go(LISTS[0])
    message = w.page.locator("tr[data-key]").last.get_attribute("data-key")
    for text, place in ((GROUP, f"/groups/{GROUP}"), (TOPIC, f"/topics/{TOPIC}"), (message, f"/messages/{message}")):
        w.page.keyboard.press("/")
        w.page.keyboard.type(f" {text} ")
        w.page.keyboard.press("Enter")
        w.page.wait_for_url(server.url + place)
    w.page.keyboard.press("/")
    w.page.keyboard.type("customer 7/8")
    w.page.keyboard.press("Enter")
    w.page.wait_for_url("**/messages?key=customer+7%2F8")
    w.go(f"/groups/{GROUP}/dead-letters")
    assert w.page.locator("nav.trail a").all_inner_texts() == ["Groups", GROUP]
