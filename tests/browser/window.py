"""A tab of the browser as tests use it."""

from __future__ import annotations

from typing import Any

from tests.support.clock import PATIENCE_SECONDS

CUT_HEADINGS = """[...document.querySelectorAll("table.rows th")].filter((head) => head.scrollWidth > head.clientWidth)
  .map((head) => head.innerText)"""
"""Headings of lists that are wider than their columns."""


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
