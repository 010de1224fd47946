"""Pages of the site that are kept elsewhere in the repository: README, changelog, the format of the log."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "format.md": "storage/log/format.md"}
_PLACES = {source: page for page, source in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add them, with links as they are from within docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=re.sub(r"\]\(([^)#:]+)(#[^)]*)?\)", _link(source), text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ to what has a page here."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def change(found: re.Match[str]) -> str:
        place = _PLACES.get(os.path.relpath(here / found[1], ROOT))
        return found[0] if place is None else f"]({os.path.relpath(ROOT / 'docs' / place, here)}{found[2] or ''})"

    return re.sub(r"\]\((\.\./[^)#]+)(#[^)]*)?\)", change, markdown)


def _link(source: str) -> Any:
    def change(found: re.Match[str]) -> str:
        target = str((ROOT / source).parent.joinpath(found[1]).resolve().relative_to(ROOT))
        if target == "docs/adr":
            target = "docs/adr/0001-index-entries-inside-the-records.md"
        return f"]({_PLACES.get(target, target.removeprefix('docs/'))}{found[2] or ''})"

    return change
