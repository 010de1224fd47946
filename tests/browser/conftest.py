"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import QUIET, chromium_path
from tests.browser.window import Window


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


@pytest.fixture
def window(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that makes windows: `window(url, width, dark)`, and further options of a context."""
    contexts = []

    def make(url: str, width: int = 1280, dark: bool = False, **options: Any) -> Window:
        context = chromium.new_context(
            viewport={"width": width, "height": 860}, color_scheme="dark" if dark else "light", **options
        )
        contexts.append(context)
        return Window(context.new_page(), url)

    yield make
    for context in contexts:
        context.close()
