"""The code of the documentation's pages, to be run as it stands there."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def fences(page: str) -> list[tuple[str, str]]:
    """(language, code) of each block of a page, also of those within lists; a block without a language has ""."""
    text = (DOCS / page).read_text()
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(code)) for _, language, code in found]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page in one language, fence by fence."""
    return [code for known, code in fences(page) if known == language]


def pages() -> list[str]:
    """Every page, as a path below docs/; the README and the format of the log, too."""
    found = [str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "adr"]
    return [*found, "../README.md", "../storage/log/format.md"]


def lines(script: str) -> list[list[str]]:
    """The commands of a shell block, word by word; `&` stays the last word of one that runs on."""
    return [
        words
        for line in script.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True, posix=True))
    ]
