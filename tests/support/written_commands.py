"""The commands of the documentation as a reader may copy them, and what is wrong with one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click

from tests.support import command_page, pages


def in_blocks() -> Iterator[tuple[str, str]]:
    """(page, line) of each line with a command of `notify`, without its comment and what it is piped into."""
    for page in pages.pages():
        for _, code in pages.fences(page):
            for line in code.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:[A-Z_]+=\S+ )*(notify .+)", line.strip())
                if found is not None:
                    yield page, re.split(r" (?:#|&&|\||>|&$)", found[1])[0]


PRODUCT = [pages.DOCS.parent / folder for folder in ("notify", "storage", "spark")]


def in_sentences() -> Iterator[tuple[str, str]]:
    """(page or module, command) of each command of `notify` between backticks, in pages and in the product's texts."""
    texts = {page: (pages.DOCS / page).read_text() for page in pages.pages() if page != "commands.md"}
    for folder in PRODUCT:
        for path in folder.rglob("*.py"):
            joined = re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # one string of several lines
            texts[str(path.relative_to(pages.DOCS.parent))] = re.sub(r"\{[^}]*\}", "…", joined)
    for name, text in texts.items():
        for command in re.findall(r"`(notify [a-z][^`]*)`", text):
            yield name, " ".join(command.split())


def fault_of_part(line: str) -> str:
    """As `fault`, for a command in a sentence, which may leave out what it needs."""
    why = fault(line)
    return "" if why.endswith(("is missing", "requires an argument.")) or why.startswith("Missing") else why


def fault(line: str) -> str:
    """The reason for which `notify` would refuse the line, or ""; `…` stands for any value, or what is as above."""
    root: Any = command_page.root()
    words = shlex.split(line.replace("…", "X"))[1:]
    command = root
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        return "" if words in ([], ["--help"]) or words[0].startswith("--") else f"there is no command {words[0]}"
    try:
        given, left, _ = command.make_parser(click.Context(command)).parse_args(words)
    except Exception as error:  # typer has classes of its own for what click raises
        return str(getattr(error, "message", "")) or repr(error)
    if left := [word for word in left if word != "X"]:
        return f"{' '.join(left)} is too much"
    if re.search(r"^notify( [a-z][a-z-]*)+ … ", f"{line} "):  # the line goes on from one above it
        return ""
    missing = [p.opts[0] for p in command.params if p.required and given.get(p.name) in (None, (), [])]
    return f"{', '.join(missing)} is missing" if missing else ""
