"""The console as others run it: below a path of nginx, without JavaScript, enlarged, by keyboard alone, on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notify.testing import InMemoryServer
from notify.testing.reachable import NotAvailable
from tests.support.groups import Caller, die, publish, subscribe
from tests.support.http import admin
from tests.support.nginx import nginx

TOPIC, GROUP = "order.placed", "points"
LONG = "a." + "very-long-name." * 8
PREFIX = "/ops/notify"


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryServer]:
    with InMemoryServer() as running:
        for group in (GROUP, LONG[:127]):
            subscribe(running.url, group, TOPIC, max_attempts=1)
        publish(running.url, TOPIC, [f"{n} " + "a long body " * 40 for n in range(40)], key=True)
        die(Caller(running.url, GROUP, "points-1"), TOPIC, 20, "OperationalError: connection refused " * 5)
        yield running


@pytest.fixture(scope="module")
def below(server: InMemoryServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address behind nginx, as docs/proxy.md has it, but for names and ports."""
    page = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text()
    (location,) = re.findall(r"(location /notify/ \{.*?\n\})", page, re.DOTALL)
    location = location.replace("http://127.0.0.1:7400", server.url).replace("/notify", PREFIX)
    try:
        with nginx(tmp_path_factory.mktemp("nginx"), server.url, location=location) as proxy:
            yield proxy.url + PREFIX
    except NotAvailable as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_below_a_path_everything_is_found(below: str, window: Any) -> None:
    w = window(below)
    w.go("/")
    w.press(f"table.dense a:text-is('{GROUP}')")
    w.page.wait_for_selector("#chart2 canvas")
    w.page.keyboard.press("/")
    w.page.keyboard.type(TOPIC)
    w.page.keyboard.press("Enter")
    w.page.wait_for_url(f"**{PREFIX}/topics/{TOPIC}")
    w.press("a:text-is('Subscribe a group')")
    with w.page.expect_response(f"**{PREFIX}/names/groups?q=po"):
        w.page.fill("#f-group", "po")
    w.page.fill("#f-group", "others")
    w.page.fill("#f-reason", "a test")
    w.press("button:text-is('Preview')")
    w.press("button:text-is('Do it')")
    assert "Done, and recorded" in w.text()
    w.press("a:text-is('Continue')")
    assert w.page.inner_text("h1") == "Group others" and w.wrong == []
    assert [address for address in w.asked if PREFIX not in address and not address.startswith("data:")] == []


@pytest.mark.long
def test_without_javascript_pages_are_read_and_writes_are_done(server: InMemoryServer, window: Any) -> None:
    w = window(server.url, java_script_enabled=False)
    w.go(f"/groups/{GROUP}")
    assert "Charts need JavaScript" in w.text() and "As of" in w.page.inner_text("#fresh")
    assert not w.page.is_visible("#chart") and w.page.is_visible("nav.bar a:text-is('Topics')")
    w.go(f"/groups/{GROUP}/dead-letters")
    assert not w.page.is_visible(".bulk")
    w.page.locator("input[name=ids]").nth(1).check()
    w.press("button:text-is('Send the selected dead letters again')")
    w.page.fill("#f-reason", "a test")
    w.press("button:text-is('Preview')")
    w.press("button:text-is('Do it')")
    assert "Done, and recorded" in w.text()
    phone = window(server.url, width=390, java_script_enabled=False)
    phone.go("/")
    assert phone.page.is_visible("nav.bar a:text-is('Topics')")


@pytest.mark.long
@pytest.mark.parametrize("path", [f"/groups/{GROUP}/dead-letters", f"/messages?topic={TOPIC}", "/topics", "/actions"])
def test_on_a_phone_a_row_is_a_card(server: InMemoryServer, window: Any, path: str) -> None:
    """A row of the messages was 227 pixels high: a line for each of its eight cells."""
    w = window(server.url, width=390)
    w.go(path)
    heights = w.page.evaluate("[...document.querySelectorAll('table.rows tbody tr')].map((row) => row.offsetHeight)")
    assert heights and max(heights) <= 150, heights
    assert w.page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 640, 1280])
def test_long_names_stay_within_the_page(server: InMemoryServer, window: Any, width: int) -> None:
    """640 pixels are a window of 1,280 at 200 %."""
    name = LONG[:127]
    w = window(server.url, width=width)
    for path in (
        "/",
        "/groups",
        f"/groups/{name}",
        f"/topics/{TOPIC}",
        "/dead-letters",
        f"/do/group.pause?group={name}",
    ):
        w.go(path)
        assert w.page.evaluate("document.documentElement.scrollWidth") <= width, path
        lists = w.page.locator(".scroll:has(table.cards)")
        assert lists.evaluate_all("all => all.every((e) => e.scrollWidth <= e.clientWidth + 1)"), path


@pytest.mark.long
def test_the_keyboard_alone_pauses_a_group(server: InMemoryServer, window: Any) -> None:
    w = window(server.url)
    w.go("/")
    w.page.keyboard.press("Tab")
    assert w.page.evaluate("document.activeElement.className") == "skip"
    w.page.keyboard.press("Enter")
    w.page.keyboard.press("/")
    w.page.keyboard.type(GROUP)
    w.page.keyboard.press("Enter")
    w.page.wait_for_url(f"**/groups/{GROUP}")
    pressed = "document.activeElement.textContent.trim()"
    for _ in range(60):
        w.page.keyboard.press("Tab")
        if w.page.evaluate(pressed) == "Pause":
            break
    with w.page.expect_navigation():
        w.page.keyboard.press("Enter")
    w.page.focus("#f-reason")
    w.page.keyboard.type("by keys")
    with w.page.expect_navigation():
        w.page.keyboard.press("Enter")
    assert w.page.evaluate("document.activeElement.id") == "preview"
    w.page.keyboard.press("Tab")
    assert w.page.evaluate(pressed) == "Do it"
    with w.page.expect_navigation():
        w.page.keyboard.press("Enter")
    assert admin(server.url, "GET", f"groups/{GROUP}")["paused"] is True
    admin(server.url, "POST", f"groups/{GROUP}/resume", {})


@pytest.mark.long
def test_on_paper_there_is_only_the_content(server: InMemoryServer, window: Any) -> None:
    w = window(server.url)
    w.go(f"/groups/{GROUP}/dead-letters")
    w.page.emulate_media(media="print")
    for gone in ("nav.bar", "form.search", ".buttons", "footer"):
        assert not w.page.locator(gone).first.is_visible(), gone
    cell = w.page.locator("td[data-l=Why]").first
    assert cell.evaluate("e => e.scrollWidth <= e.clientWidth"), "a reason is printed whole"


@pytest.mark.long
def test_a_second_click_and_a_way_back_do_nothing_again(server: InMemoryServer, window: Any) -> None:
    admin(server.url, "PUT", "topics/clicks", {})
    w = window(server.url)
    w.go("/do/message.send?topic=clicks")
    w.page.fill("#f-body", "1")
    w.page.fill("#f-reason", "a test")
    w.press("button:text-is('Preview')")
    w.page.dblclick("button:text-is('Do it')")
    w.page.wait_for_selector("h2:text-is('Result')")
    w.page.reload()
    assert "Nothing was done again" in w.text()
    queues = admin(server.url, "GET", "topics/clicks")["queues"]
    assert sum(queue["end"] for queue in queues) == 1
