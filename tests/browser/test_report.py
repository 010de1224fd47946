"""The audit's report in a real browser: in light and dark, on a phone and a screen, with a keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from notify.spark.report.page import page
from tests.audit.reported import COMMANDS, result, serving

LEAST_CONTRAST = 4.5
"""WCAG 2.2, level AA, for text of this size."""
# The contrast of each text with the first opaque background behind it.
CONTRASTS = """() => {
  const channels = text => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = channels(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return channels(getComputedStyle(document.body).backgroundColor);
  };
  const rows = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join("").trim();
    if (!text || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const front = channels(node.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(front), light(behind(node))];
    rows.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 40)]);
  }
  return rows;
}"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server with the report alone."""
    with serving(page(result())) as served:
        yield served.url


LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "dark"),
    [(390, False), (1280, True), pytest.param(390, True, marks=LONG), pytest.param(1280, False, marks=LONG)],
)
def test_it_fits_and_can_be_read(window: Any, url: str, tmp_path: Path, width: int, dark: bool) -> None:
    tab = window(url, width, dark)
    tab.go("/")
    tab.page.screenshot(path=str(tmp_path / f"report-{width}-{dark}.png"), full_page=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, "no horizontal scrolling"
    weak = [row for row in tab.page.evaluate(CONTRASTS) if row[0] < LEAST_CONTRAST]
    assert weak == []
    first = tab.page.locator(".causes code").first
    assert first.inner_text() == COMMANDS[0]
    box = first.bounding_box()
    assert box["y"] + box["height"] <= 860, "the first command is above the fold"
    assert tab.wrong == [] and {address.removeprefix(url) for address in tab.asked} <= {"/", "/favicon.ico"}


@pytest.mark.long
def test_a_command_is_chosen_with_one_click_and_reached_by_keyboard(window: Any, url: str) -> None:
    tab = window(url)
    tab.go("/")
    tab.page.locator(".causes code").nth(1).click()
    assert tab.page.evaluate("getSelection().toString()").strip() == COMMANDS[1]
    tab.go("/")
    reached = []
    while len(reached) < 30:
        tab.page.keyboard.press("Tab")
        name = tab.page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className")
        if name.strip() == "BODY":
            break  # around the end
        reached.append(name)
        outline = tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{reached[-1]} shows that it has the focus"
    assert [name.strip() for name in reached[:3]] == ["CODE", "CODE", "DIV scroll"], reached
    assert any(name.startswith("SUMMARY") for name in reached)
