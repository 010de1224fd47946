"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import QUIET, chromium_path
from tests.support.clock import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for one module only: while Playwright runs, the main thread can run no other event loop."""
    path = chromium_path()
    if path is None:
        pytest.skip("no Chromium is installed here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


class Window:
    """A tab that notes its errors and every address that it requested."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.url = url
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))

    def go(self, path: str) -> Any:
        """Open a page of the console; return the answer."""
        return self.page.goto(self.url + path)

    def press(self, selector: str) -> None:
        """Click what leads to another page, and wait until that is there."""
        with self.page.expect_navigation():
            self.page.click(selector)

    def text(self) -> str:
        return str(self.page.inner_text("main"))


@pytest.fixture
def window(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes windows: `window(url, width, dark)`."""
    contexts = []

    def make(url: str, width: int = 1280, dark: bool = False) -> Window:
        context = chromium.new_context(
            viewport={"width": width, "height": 860}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        return Window(context.new_page(), url)

    yield make
    for context in contexts:
        context.close()
