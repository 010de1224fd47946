"""Pages of the site that are kept elsewhere in the repository: README, changelog, the format of the log."""

from __future__ import annotations

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
    return re.sub(r"\]\(\.\./([^)#]+)\)", lambda m: f"]({_PLACES.get(m[1], '../' + m[1])})", markdown)


def _link(source: str) -> Any:
    def change(found: re.Match[str]) -> str:
        target = str((ROOT / source).parent.joinpath(found[1]).resolve().relative_to(ROOT))
        if target == "docs/adr":
            target = "docs/adr/0001-index-entries-inside-the-records.md"
        return f"]({_PLACES.get(target, target.removeprefix('docs/'))}{found[2] or ''})"

    return change
