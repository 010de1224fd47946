"""Pictures of the console in the documentation are drawn from the templates and styles as they are now."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.browser.pictures import FOLDER, PICTURES, ROOT, Picture, digest

BYTES = 60_000
"""A picture is text that is read in reviews: so large it may be."""


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.page for picture in PICTURES])
def test_a_picture_is_of_the_console_as_it_is(picture: Picture) -> None:
    text = (FOLDER / f"{picture.page}.svg").read_text()
    assert f"made of {digest(picture)} " in text, "a template or style changed: run `make pictures`, and look at them"
    assert len(text) < BYTES and not re.search(r"data:|<script|127\.0\.0\.1:(?!9/)", text)
    assert ElementTree.fromstring(text).get("width") == "1120"  # what is not well-formed is shown by no browser


def test_every_picture_is_in_a_page_with_its_words() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for picture in PICTURES:
        assert f"![{picture.says}]" in pages, f"{picture.page}.svg is in no page"
    assert {path.stem for path in FOLDER.iterdir()} == {picture.page for picture in PICTURES}
