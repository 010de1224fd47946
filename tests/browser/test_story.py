"""A message's page as its story, the counts of the menu, and fields that offer names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.browser.semantics import tree_of, value, wrong_with
from tests.support.groups import Caller, publish, subscribe
from tests.support.http import admin, post
from tests.support.transactions import half_request, new_id

TOPIC, GROUP = "order.placed", "points"
NAME = "shop, production"
TRACE = "4b" * 16
TRACEBACK = 'Traceback (most recent call last):\n  File "points.py", line 41, in add\nValueError: no such customer'
PLACES = """() => [...document.querySelectorAll("svg.lane")].map((lane) => {
  const whole = lane.getBoundingClientRect();
  return [...lane.querySelectorAll("rect, line:not(.tick)")].map((bar) => {
    const own = bar.getBoundingClientRect();
    return [bar.getAttribute("class"), (own.left - whole.left) / whole.width, own.width / whole.width];
  });
})"""
"""For each lane of the drawing its bars: kind, and where they begin and how long they are, as shares of its width."""


class Told:
    """A message that was committed, failed twice in one group, which gave it up, and took effect in another."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        subscribe(self.url, GROUP, TOPIC, max_attempts=2, retry_min=0.2)
        subscribe(self.url, "mail", TOPIC)
        name = new_id()
        request = half_request(
            "orders", name, topic=TOPIC, key="7", headers={"traceparent": f"00-{TRACE}-{'5c' * 8}-01"}
        )
        post(self.url, "/v1/transactions", request)
        outcome = {"producer_group": "orders", "outcomes": [{"id": name, "outcome": "COMMIT"}]}
        post(self.url, "/v1/transactions/outcomes", outcome)
        self.message = f"{name}.0"
        self.caller = Caller(self.url, GROUP, "points-1")
        for _ in range(2):
            got = self.caller.receive(TOPIC, wait=30, max=1)
            self.caller.settle(got, "retry", reason="ValueError: no such customer (at points.add:41)", trace=TRACEBACK)
        mail = Caller(self.url, "mail", "mail-1")
        mail.settle(mail.receive(TOPIC, wait=30, max=1))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    environment = {
        "NOTIFY_ALARM_EVERY_SECONDS": "0.2", "NOTIFY_NAME": NAME,
        "NOTIFY_TRACE_URL": "https://traces.example/t/{trace}?all",
    }  # fmt: skip
    process = ServerProcess(tmp_path_factory.mktemp("story") / "data", environment=environment).start()
    yield Told(process)
    process.stop()


@pytest.mark.long  # tests/unit/test_story.py measures the bars
def test_the_drawing_is_to_scale(told: Told, window: Any) -> None:
    w = window(told.url)
    w.go(f"/messages/{told.message}?scale=linear")
    life = admin(told.url, "GET", f"messages/{told.message}")
    _, points, mail, _ = w.page.evaluate(PLACES)
    assert [kind for kind, _, _ in points] == ["wait", "failed", "wait", "failed", "dead"]
    assert [kind for kind, _, _ in mail] == ["wait", "work"]
    # As long as in the answer of the admin route: the last bar, of the dead letter, reaches until now.
    ends = [left + width for _, left, width in points]
    assert ends[-1] == pytest.approx(1, abs=0.01)
    assert all(left == pytest.approx(end, abs=0.01) for end, (_, left, _) in zip(ends, points[1:], strict=False))
    retry = next(event for event in life["timeline"] if event["event"] == "attempt 1 failed")
    assert retry["trace"] == TRACEBACK
    w.press("a:text-is('logarithmic')")
    assert w.page.url.endswith("?scale=logarithmic") and "Scale: logarithmic" in w.text()
    assert w.wrong == []


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_the_story_has_tracebacks_links_and_a_way_to_correct(told: Told, window: Any, width: int) -> None:
    w = window(told.url, width=width)
    w.go(f"/messages/{told.message}")
    events = w.page.locator("#events li")
    assert events.count() == events.locator("time[datetime]").count() > 6
    assert w.page.locator("#events details").count() == 2
    details = w.page.locator("#events li:has-text('attempt 1 failed') details")
    assert not details.locator("pre").is_visible()
    details.locator("summary").click()
    assert details.locator("pre").inner_text() == TRACEBACK
    w.page.evaluate("() => window.notifyRefresh()")
    assert details.locator("pre").is_visible(), "it stays open"
    assert w.page.get_attribute(f"a:text-is('{TRACE}')", "href") == f"https://traces.example/t/{TRACE}?all"
    assert w.page.get_attribute("#events a:text-is('points-1') >> nth=0", "href") == "/groups/points#consumers"
    assert w.page.evaluate("document.documentElement.scrollWidth") <= width
    if width > 1200:
        state, timeline = (w.page.locator(f"h2:text-is('{name}')").bounding_box() for name in
                           ("State in each group", "Timeline"))  # fmt: skip
        assert state["y"] == timeline["y"] and state["x"] > timeline["x"], "side by side"
    assert wrong_with(w) == []
    w.press("a:text-is('correct and send')")
    assert w.page.inner_text("h1") == "Correct a dead letter and send it again"
    w.press("a:text-is('Cancel')")
    assert w.page.inner_text("h1") == "Dead letters of points"


def test_a_screen_reader_is_told_the_story(told: Told, window: Any) -> None:
    w = window(told.url)
    w.go(f"/messages/{told.message}")
    nodes = [(value(node, "role"), value(node, "name")) for node in tree_of(w)]
    (drawing,) = [name for role, name in nodes if role in ("image", "img") and "lanes" in name]
    assert drawing.startswith("3 lanes over ") and "the list below has every event" in drawing
    menu = [name for role, name in nodes if role == "link" and name.startswith("Dead letters")]
    assert menu == ["Dead letters 1 dead letter"]
    w.go(f"/do/group.reset?group={GROUP}")
    assert ("combobox", "Topic *") in [(value(node, "role"), value(node, "name")) for node in tree_of(w)]


@pytest.mark.long
def test_the_menu_counts_what_waits_and_follows_it(told: Told, window: Any) -> None:
    w = window(told.url)
    w.go("/topics")
    assert NAME in w.page.inner_text(".bar .name") and w.page.title() == f"Topics – {NAME} – Notify"
    letters = w.page.locator("#menu a[href='/dead-letters'] .count")
    w.page.wait_for_function("() => document.querySelector('#menu a[href=\"/dead-letters\"] .count')")
    assert letters.inner_text().startswith("1")
    assert w.page.locator("#menu a[href='/transactions'] .count").count() == 0, "nothing waits there"
    half = new_id()
    post(told.url, "/v1/transactions", half_request("orders", half, topic=TOPIC, body="1"))
    w.page.wait_for_selector("#menu a[href='/transactions'] .count")  # with a refresh of the live page
    admin(told.url, "POST", f"transactions/{half}/rollback", {})
    w.page.wait_for_selector("#menu a[href='/transactions'] .count", state="detached")
    assert w.wrong == []


@pytest.mark.long
def test_a_field_offers_the_names_that_begin_with_what_is_typed(told: Told, window: Any) -> None:
    for name in ("stock.reserved", "stock.gone"):
        publish(told.url, name, ["x"])
    w = window(told.url)
    w.go(f"/do/group.reset?group={GROUP}")
    offered = "() => [...document.querySelectorAll('#names-topics option')].map((option) => option.value)"
    w.page.focus("#f-topic")
    w.page.wait_for_selector("#names-topics[data-offered='']", state="attached")
    assert w.page.evaluate(offered) == [TOPIC, "stock.gone", "stock.reserved"]
    w.page.keyboard.type("stock.r")
    w.page.wait_for_selector("#names-topics[data-offered='stock.r']", state="attached")
    assert w.page.evaluate(offered) == ["stock.reserved"]
    w.go("/groups")
    w.page.focus("form.search input[name=prefix]")
    w.page.wait_for_selector("#names-groups[data-offered='']", state="attached")
    assert w.page.locator("#names-groups option").count() == 2
    assert w.wrong == []
