"""Pictures of the console for the documentation: SVG files that hold a page as the browser has it, text and all.

`make pictures` draws them again from a server with the data of tests/browser/busy.py; a unit test fails where a
template or the styles changed since (`digest`). A picture is text: an SVG with the page's own HTML and styles in it, so
that it is sharp at every size, follows the reader's light or dark, and no binary file is committed.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from notify.server.console.rendering import HERE
from notify.testing.process import ServerProcess
from tests.browser.busy import ENVIRONMENT, Busy
from tests.browser.chromium import QUIET, chromium_path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 1120


class Picture(NamedTuple):
    """One picture: the page's name in `Busy.pages`, its template, its height, and what it shows in words."""

    page: str
    template: str
    height: int
    says: str


PICTURES = (
    Picture(
        "overview", "overview.html", 860, "The overview: alarms with their remedies, groups by what they need, rates"
    ),
    Picture(
        "transaction", "transaction.html", 640, "A parked transaction: who was asked, what they answered, what to do"
    ),
    Picture("dead-letters", "dead_letters.html", 900, "Dead letters by cause, and one by one"),
    Picture("message", "message.html", 800, "A message: where it stands in each group, and its timeline"),
    Picture("edit", "change.html", 560, "A dead letter is corrected before it is sent again"),
)

DRAWN = """([width, height, css]) => {
  const frame = document.querySelector(".frame").cloneNode(true);
  const real = [...document.querySelectorAll(".frame *")];
  [...frame.querySelectorAll("*")].forEach((copy, n) => {
    const place = real[n].getBoundingClientRect();
    if (place.top > height || copy.hidden) copy.dataset.gone = "";
    for (const name of ["href", "action", "autofocus", "data-copy", "title"]) copy.removeAttribute(name);
    if (copy.tagName === "A") copy.setAttribute("class", `${copy.getAttribute("class") || ""} link`.trim());
    if (copy.tagName === "TEXTAREA") copy.textContent = real[n].value;
    if (copy.tagName === "INPUT" && real[n].value) copy.setAttribute("value", real[n].value);
  });
  for (const gone of frame.querySelectorAll("[data-gone]")) gone.remove();
  const svg = new XMLSerializer().serializeToString(frame);
  const size = `viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size}><style>${css}</style>` +
    `<foreignObject width="${width}" height="${height}">` +
    `<div xmlns="http://www.w3.org/1999/xhtml" class="page">${svg}</div></foreignObject></svg>`;
}"""
"""The page in the window as an SVG document, without what lies below the picture's height."""


def styles() -> str:
    """The console's styles for a picture: it has no `body`, and is no phone however small it is shown."""
    css = (HERE / "static" / "console.css").read_text()
    css = css[: css.index("@media (max-width")]  # the rules for narrow windows are the last ones
    return (
        css.replace("body {", ".page {")
        + ".link { text-decoration: underline; } .bar .link, .button.link { text-decoration: none; }"
    )


def digest(picture: Picture) -> str:
    """The state of everything that a picture is drawn from, but the server's answers."""
    sources = [HERE / "templates" / name for name in ("base.html", "parts.html", picture.template)]
    sources += [HERE / "static" / "console.css", Path(__file__), Path(__file__).with_name("busy.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def draw(page: Any, busy: Busy, picture: Picture) -> str:
    """The text of a picture's file."""
    page.set_viewport_size({"width": WIDTH, "height": picture.height})
    page.goto(busy.url + busy.pages()[picture.page])
    drawn = str(page.evaluate(DRAWN, [WIDTH, picture.height, styles()]))
    drawn = re.sub(r"\n\s*\n+", "\n", drawn)
    return f"<!-- drawn by `make pictures`; made of {digest(picture)} -->\n{drawn}\n"


def main() -> int:
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    if path is None:
        print("no Chromium is installed here")
        return 2
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory) / "data", environment=ENVIRONMENT).start()
        try:
            busy = Busy(server)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
                page = browser.new_page()
                for picture in PICTURES:
                    (FOLDER / f"{picture.page}.svg").write_text(draw(page, busy, picture))
                browser.close()
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
