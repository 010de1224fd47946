"""The console as it is seen and used: contrast in light and dark, previews in sentences, pages that keep themselves
up to date without taking the keyboard's focus, and that say so where the server is unreachable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.support.groups import Caller, die, publish, subscribe
from tests.support.http import admin, post
from tests.support.transactions import half_request, new_id

CONTRASTS = """(least = 4.5) => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.nodeValue.trim());
    if (!own || !e.checkVisibility() || e.closest("svg, canvas, .u-legend, .skip")) continue;
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = e.textContent.trim().slice(0, 30);
    if (ratio < least) bad.push(`${e.tagName}.${e.className} "${text}" ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
"""Texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, 1.4.3), or a greater number."""
HIDDEN_COLUMNS = """[...document.querySelectorAll(".scroll")]
  .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map((e) => e.innerText.slice(0, 60))"""
"""Tables of which a part is beyond the edge, where a phone shows no bar to scroll."""
SCHEMES = (
    ({"color_scheme": "light", "contrast": "no-preference"}, 4.5), ({"color_scheme": "dark"}, 4.5),
    ({"contrast": "more"}, 7), ({"color_scheme": "light"}, 7),
)  # fmt: skip
"""The media that are emulated, one after the other, and the least contrast then: 7 is that of WCAG 2.2, 1.4.6."""
WIDTHS = (1920, 1280, 390)


class Scene:
    """A server with something of everything that is coloured."""

    def __init__(self, url: str) -> None:
        self.url = url
        for group in ("points", "mail"):
            subscribe(url, group, "order.placed", max_attempts=1)
        publish(url, "order.placed", [str(n) for n in range(30)], key=True)
        caller = Caller(url, "points", "points-1")
        dead = caller.receive("order.placed", max=3)
        caller.settle(dead, "dead_letter", reason="no such customer")
        self.letter = dead[0]["id"]
        self.half = self.prepare()

    def prepare(self) -> str:
        name = new_id()
        post(self.url, "/v1/transactions", half_request("orders", name, topic="order.placed", key="7"))
        return name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("looks") / "data", environment={"NOTIFY_ALARM_EVERY_SECONDS": "0.2"}
    )
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def scene(server: ServerProcess) -> Scene:
    return Scene(server.url)


def preview(w: Any, path: str) -> None:
    w.go(path)
    w.page.fill("#f-reason", "a test")
    w.press("button:has-text('Preview')")


@pytest.mark.long
def test_every_text_can_be_read(scene: Scene, window: Any) -> None:
    """`Do it` was red on blue, with a contrast of 1.07 in light and 1.00 in dark."""
    w = window(scene.url)
    seen = []
    pages = ["/", "/transactions", f"/transactions/{scene.half}", "/groups/points", "/groups/points/dead-letters",
             "/messages?topic=order.placed", f"/messages/{scene.letter}", "/topics", "/settings", "/login", "/actions",
             f"/do/dead-letters.edit?group=points&id={scene.letter}"]  # fmt: skip
    for path in [*pages, f"/do/transaction.commit?transaction={scene.half}"]:
        w.go(path) if not path.startswith("/do/") else preview(w, path)
        for scheme, least in SCHEMES:
            w.page.emulate_media(**scheme)
            seen += [f"{path} {scheme}: {text}" for text in w.page.evaluate(CONTRASTS, least)]
        for width in WIDTHS:
            w.page.set_viewport_size({"width": width, "height": 860})
            if w.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"):
                seen.append(f"{path} is wider than {width} pixels")
            seen += [f"{path} hides columns at {width} pixels: {head}" for head in w.page.evaluate(HIDDEN_COLUMNS)]
    assert w.page.locator("button.danger:has-text('Do it')").count() == 1
    assert seen == []


@pytest.mark.long
def test_in_colours_of_the_system_nothing_is_told_by_a_background(scene: Scene, window: Any) -> None:
    """In Windows' contrast themes backgrounds and shadows are gone: what they told has an outline or a border."""
    w = window(scene.url)
    w.page.emulate_media(forced_colors="active")
    w.go("/transactions")
    assert w.page.evaluate("matchMedia('(forced-colors: active)').matches")
    outline = "e => getComputedStyle(e).outlineStyle + getComputedStyle(e).outlineWidth"
    for place in ("nav.bar a[aria-current]", "nav.tabs a[aria-current]"):
        assert w.page.locator(place).first.evaluate(outline) == "solid3px", place
    assert w.page.locator(".button.danger").first.evaluate("e => getComputedStyle(e).borderTopStyle") == "double"
    w.go(f"/messages/{scene.letter}")
    shines = "e => getComputedStyle(e).color !== getComputedStyle(document.body).backgroundColor"
    assert w.page.locator(".button.first").first.evaluate(shines), "a browser puts a ground of the page behind text"
    colours = w.page.evaluate(
        """() => ["ol.timeline li", ".lane .wait"].map((name) => document.querySelector(name))
             .map((e) => [getComputedStyle(e, e.matches("li") ? "::before" : null), getComputedStyle(document.body)])
             .map(([own, page]) => [own.borderTopStyle === "solid" ? own.borderTopColor : own.stroke, page.color])"""
    )
    assert all(own == text for own, text in colours), colours
    assert w.page.evaluate(CONTRASTS) == [] and w.wrong == []


@pytest.mark.long
def test_a_preview_is_sentences_and_has_the_focus(scene: Scene, window: Any) -> None:
    w = window(scene.url)
    preview(w, f"/do/transaction.commit?transaction={scene.half}")
    assert w.page.evaluate("document.activeElement.id") == "preview"
    text = w.page.inner_text("#preview")
    assert "The transaction is PREPARED now, and becomes COMMITTED." in text
    assert "It has 1 message, which these groups receive:" in text and "mail, points" in text
    preview(w, "/do/group.reset?group=points&topic=order.placed&to=earliest")
    assert "The group gets 3 messages again." in w.page.inner_text("#preview")
    preview(w, "/do/topic.delete?topic=order.placed")
    text = w.page.inner_text("#preview")
    assert "30 messages at most" in text and "{" not in text


@pytest.mark.long
def test_a_live_page_keeps_the_focus_and_says_how_old_it_is(scene: Scene, window: Any) -> None:
    w = window(scene.url)
    w.go("/transactions")
    link = w.page.locator("tbody a.id").first
    link.focus()
    w.page.evaluate("window.first = document.querySelector('tbody tr')")
    rows = w.page.locator("tbody tr").count()
    name = scene.prepare()
    w.page.wait_for_function("count => document.querySelectorAll('tbody tr').length === count", arg=rows + 1)
    assert link.evaluate("e => document.activeElement === e")
    assert w.page.evaluate("document.activeElement.tagName + document.contains(window.first)") == "Atrue"
    assert "Updated" in w.page.inner_text("#fresh")
    w.go("/groups/points/dead-letters")
    box = w.page.locator("tbody input[type=checkbox]").nth(1)
    box.check()
    chosen = box.get_attribute("value")
    w.page.evaluate("() => window.notifyRefresh()")
    assert w.page.locator(f"input[value='{chosen}']").is_checked()
    admin(scene.url, "POST", f"transactions/{name}/rollback", {})
    assert w.wrong == []


def test_updates_can_be_paused(scene: Scene, window: Any) -> None:
    """Rows that move while they are read are hard to read (WCAG 2.2, 2.2.2)."""
    w = window(scene.url)
    w.page.clock.install()
    w.go("/groups/points")
    w.page.click("#pause")
    asked: list[str] = []
    w.page.on("request", lambda request: asked.append(request.url))
    w.page.clock.run_for(60_000)
    assert asked == []
    assert "Updates are paused" in w.page.inner_text("#fresh")
    with w.page.expect_response(scene.url + "/groups/points"):
        w.page.click("#pause")
    w.page.wait_for_function("document.getElementById('fresh').textContent.startsWith('Updated')")
    with w.page.expect_response(scene.url + "/groups/points"):
        w.page.clock.run_for(10_000)
    assert w.wrong == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "field"), [("/transactions", "id"), ("/groups/points/dead-letters", "contains"), ("/topics", "prefix")]
)
def test_typed_search_text_survives_a_refresh(scene: Scene, window: Any, path: str, field: str) -> None:
    """A form's field named `id` hid the id of the form: each refresh put a new form there, without what was typed."""
    w = window(scene.url)
    w.go(path)
    box = w.page.locator(f"form.search input[name={field}]")
    box.fill("typed by now")
    w.page.evaluate("() => window.notifyRefresh()")
    assert box.input_value() == "typed by now"
    assert box.evaluate("e => document.activeElement === e")
    assert w.wrong == []


@pytest.mark.long
def test_alarms_lead_to_their_page_and_letters_sent_again_are_none(scene: Scene, window: Any) -> None:
    w = window(scene.url)
    w.go("/")
    w.page.wait_for_selector("#alarms a:has-text('dead letters')")
    assert "redrive, drop or delete" in w.page.inner_text("#alarms")
    assert w.page.get_attribute("#alarms a:has-text('dead letters')", "href") == "/groups/points/dead-letters"
    admin(scene.url, "POST", "groups/points/dead-letters/redrive", {"max": 100})
    w.page.wait_for_selector(".tile:has-text('Dead letters') a:text-is('0')")
    w.go("/dead-letters")
    assert w.page.inner_text("tbody tr").split() == ["points", "0", "3"]


@pytest.mark.long
def test_a_chart_says_its_figures_in_words_and_as_a_table(scene: Scene, window: Any) -> None:
    w = window(scene.url)
    w.go("/groups/points")
    w.page.wait_for_selector("#chart2 canvas")
    assert "lag " in w.page.inner_text("#chart-told2") and "(times are UTC" in w.page.inner_text("#chart-told2")
    w.page.focus("#charts input[value=hour]")
    w.page.keyboard.press("ArrowRight")
    w.page.wait_for_selector("#charts[data-span=day]")
    w.page.click("#charts summary")
    w.page.wait_for_selector("#charts details th")  # the browser tells of an opened `details` after the click
    headings = w.page.locator("#charts details th").all_inner_texts()
    kinds = ("commit to ack", "commit to consumer", "handler")
    times = [f"{kind} {share}" for kind in kinds for share in ("p50", "p95", "p99")]
    assert headings == ["At", "settled/s", "lag messages", "oldest", "dead letters", *times]
    assert w.page.locator("#charts details tr").nth(1).inner_text()[:2] == "20"  # the year of an ISO date
    w.page.evaluate("document.querySelector('#chart2 canvas').dataset.light = ''")
    w.page.emulate_media(color_scheme="dark")
    w.page.wait_for_selector("#chart2 canvas:not([data-light])")  # drawn again, in the colours of the dark
    assert w.page.evaluate(CONTRASTS) == [] and w.wrong == []
    w.go("/")
    time = w.page.locator(".chart:not([data-solo]) .u-legend .u-series").first
    time.wait_for(state="attached")
    assert time.is_hidden(), "a legend began with 'at' and no time, without a cursor"


@pytest.mark.long
def test_a_late_answer_is_not_drawn_over_the_span_that_was_chosen_meanwhile(scene: Scene, window: Any) -> None:
    w = window(scene.url)
    held: list[Any] = []
    w.page.route("**/groups/points/history?span=hour", lambda route: held.append(route))
    w.go("/groups/points")
    w.page.focus("#charts input[value=hour]")
    w.page.keyboard.press("ArrowRight")
    w.page.wait_for_selector("#charts[data-span=day]")
    with w.page.expect_response("**/groups/points/history?span=hour") as answered:
        held[0].continue_()
    answered.value.finished()
    w.page.evaluate("() => new Promise((done) => setTimeout(done, 0))")
    assert w.page.get_attribute("#charts", "data-span") == "day"


@pytest.mark.long
def test_topics_are_sorted_by_a_heading(scene: Scene, window: Any) -> None:
    publish(scene.url, "fewer", ["x"])
    w = window(scene.url, width=1920)
    w.go("/topics")
    w.press("th a:has-text('Kept')")
    names = w.page.locator("tbody td:first-child").all_inner_texts()
    assert names.index("order.placed") < names.index("fewer")
    assert w.page.get_attribute("th:has-text('Kept')", "aria-sort") == "descending"
    assert not any(name.startswith("dead-letter.") for name in names)
    assert w.page.evaluate(CONTRASTS) == []
    w.press("th a:has-text('Last message')")
    assert w.page.locator("tbody td:first-child").first.inner_text() == "fewer"


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 390])
def test_the_overview_begins_with_the_groups_and_sorts_them(scene: Scene, window: Any, width: int) -> None:
    subscribe(scene.url, "stock", "stock.reserved", max_attempts=1)
    publish(scene.url, "stock.reserved", [str(n) for n in range(9)])
    die(Caller(scene.url, "stock", "stock-1"), "stock.reserved", 9, "no such item")
    w = window(scene.url, width=width)
    w.go("/")
    names = w.page.locator("table.dense tbody td:first-child")
    assert names.all_inner_texts().index("mail") < names.all_inner_texts().index("stock")
    assert "no consumer" in w.page.inner_text("tr[data-key=mail]")
    assert w.page.get_attribute("th:has-text('State')", "aria-sort") == "descending"
    w.press("th a:text-is('Dead letters')")
    assert names.first.inner_text() == "stock" and w.page.url.endswith("?sort=dead_letters")
    w.press("th a:text-is('Group')")
    shown = names.all_inner_texts()
    assert shown == sorted(shown) and w.page.get_attribute("th:has-text('Group')", "aria-sort") == "ascending"
    assert w.page.locator(".scroll").first.evaluate("e => e.scrollWidth <= e.clientWidth")
    w.press("table.dense a:text-is('points')")
    assert w.page.inner_text("h1") == "Group points"


def test_a_message_says_where_it_stands(scene: Scene, window: Any) -> None:
    caller = Caller(scene.url, "points", "points-1")
    dead = caller.receive("order.placed", wait=30, max=1)
    caller.settle(dead, "dead_letter", reason="no such customer")
    w = window(scene.url)
    w.go(f"/messages/{dead[0]['id']}")
    row = w.page.locator("tr:has(a:text-is('points'))")
    assert "dead letter" in row.inner_text() and row.locator("a:text-is('correct and send')").count() == 1
    w.go("/messages?topic=order.placed")
    w.page.locator("tbody input[type=checkbox]").nth(1).check()
    w.press("button:has-text('Send the selected messages to a group again')")
    assert w.page.input_value("#f-ids") != ""


@pytest.mark.long
def test_messages_come_newest_first_in_pages(scene: Scene, window: Any) -> None:
    publish(scene.url, "many", [f"m{n}" for n in range(250)])
    w = window(scene.url)
    w.go("/messages?topic=many")
    bodies = w.page.locator("tbody td:last-child").all_inner_texts()
    for _ in range(2):
        w.press("a[rel=next]")
        bodies += w.page.locator("tbody td:last-child").all_inner_texts()
    assert bodies == [f"m{n}" for n in reversed(range(250))]
    assert w.page.locator("a[rel=next]").count() == 0
    height = w.page.locator("tbody tr").first.evaluate("e => e.getBoundingClientRect().height")
    assert height < 45, "a row has one line"


@pytest.mark.long
def test_a_server_that_is_away_is_said(server: ServerProcess, scene: Scene, window: Any) -> None:
    """The last test of the module: its server is gone then."""
    w = window(scene.url)
    w.go("/")
    assert not w.page.is_visible("#away")
    server.kill()
    w.page.wait_for_selector("#away:visible")
    assert "No answer since" in w.page.inner_text("#fresh")
    server.start()
    w.page.wait_for_selector("#away", state="hidden")
    assert "Updated" in w.page.inner_text("#fresh")
