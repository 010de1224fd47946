"""Each page of the console as a screen reader is given it: names, landmarks, headings, tables, and what is announced.

The console has no dialogs: a form and its
preview are pages, and the focus after each is tested in test_looks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from notify.testing.process import ServerProcess
from tests.browser.busy import ENVIRONMENT, Busy
from tests.browser.semantics import wrong_with
from tests.browser.window import Window

NAMES = (
    "overview", "transactions", "transaction", "messages", "message", "topics", "topic", "groups", "group", "push",
    "dead-letters", "dead-letter-groups", "schedules", "schedule", "change-schedule", "nodes", "audits",
    "jobs", "job", "settings", "access", "actions", "send", "edit", "login", "error", "subscribe", "priorities",
    "decide",
)  # fmt: skip
"""The pages of `Busy.pages`."""
FIRST = frozenset({"overview", "messages", "message", "group", "dead-letters", "decide", "login"})
"""The pages that `make test` looks at; the others follow in `make test-long`."""
PREVIEWED = ("decide", "send")
"""Forms whose preview is looked at, too."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    server = ServerProcess(tmp_path_factory.mktemp("semantics") / "data", environment=ENVIRONMENT).start()
    yield Busy(server)
    server.stop()


@pytest.fixture(scope="module")
def w(chromium: Any, busy: Busy) -> Iterator[Window]:
    """One window for all pages: each test begins with a page of its own."""
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    yield Window(context.new_page(), busy.url)
    context.close()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_a_screen_reader_is_given_what_the_eye_sees(busy: Busy, w: Window, name: str) -> None:
    w.go(busy.pages()[name])
    assert wrong_with(w, name == "login") == []
    if name in PREVIEWED:
        w.page.fill("#f-reason", "a test")
        w.press("button:has-text('Preview')")
        assert w.page.evaluate("document.activeElement.id") == "preview"
        assert wrong_with(w) == []


def test_every_page_of_the_busy_server_is_looked_at(busy: Busy) -> None:
    assert set(busy.pages()) == set(NAMES)


@pytest.mark.long
def test_a_live_region_announces_each_event_once(w: Window) -> None:
    """The number of alarms is a status of its own; the alarms themselves, with their ages, are read when wanted."""
    w.go("/")
    w.page.wait_for_selector("#alarms")
    w.page.evaluate("""() => {
      window.said = 0;
      const look = new MutationObserver((changes) => { window.said += changes.length; });
      for (const e of document.querySelectorAll("[aria-live], [role=status]")) {
        look.observe(e, { childList: true, subtree: true, characterData: true });
      }
    }""")
    live = "() => Array.from(document.querySelectorAll('[aria-live], [role=status]'), (e) => e.textContent)"
    before = w.page.evaluate(live)
    for _ in range(2):
        w.page.evaluate("() => window.notifyRefresh()")
    # An alarm may be raised meanwhile: then its number is announced.
    assert (w.page.evaluate("window.said") > 0) == (w.page.evaluate(live) != before)
    w.go("/transactions")
    w.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    w.page.locator("button.copy").first.click()
    # A function: to look at a bare expression again, the browser would need eval, which the console forbids.
    w.page.wait_for_function("() => document.querySelector('#said').textContent === 'Copied'")
