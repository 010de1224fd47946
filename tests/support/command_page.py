"""The commands of `notify`: docs/commands.md, made from their parsers (see generated_docs.py), and what is wrong with a
command that a page or a sentence tells a reader to run."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from notify.cli import api, main
from tests.support import pages

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
HEAD = """# Commands

This page lists every command of `notify` with its flags. `make reference` makes it from the commands themselves.

Exit codes: 0 success, 1 bad news (such as findings), 2 the command could not run. `notify --install-completion`
installs completion of commands and flags in your shell.

Every flag can be set by an environment variable: `NOTIFY_RELAY_INTERVAL` is `--interval` of `notify relay`. Where a
shorter name is given below, that one counts. A flag on the command line wins. The flags of `notify serve` are
[settings](reference.md#settings).

These flags mean the same in every command that has them:
"""
SHARED = {"url": api.URL, "reason": api.REASON, "dry_run": api.DRY_RUN, "as_json": api.AS_JSON, "wide": api.WIDE}
"""The flags that are described once, above the commands."""


def page() -> str:
    """The text of the page."""
    groups = root().commands
    shared = {p.name: p for _, command in commands() for p in command.params if _is_shared(p)}
    lines = [HEAD, *_flags([shared[name] for name in SHARED]), ""]
    section = ""
    for name, command in commands():
        words = name.split()
        if len(words) == 2 or words[1] != section:
            section = words[1]
            lines += [f"## notify {section}", ""]
            if len(words) > 2:
                lines += [_first(groups[section].help), ""]
        lines += [f"`{' '.join([name, *_usage(command)])}`", "", _first(command.help), ""]
        own = [p for p in command.params if p.name != "help" and not _is_shared(p) and getattr(p, "help", None)]
        if own:
            lines += [*_flags(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def commands() -> list[tuple[str, Any]]:
    """Each command with its whole name, in the order of `--help`."""
    return list(_commands(root(), "notify"))


def root() -> Any:
    """`notify` itself, with all its commands."""
    return main.command()


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _is_shared(p: Any) -> bool:
    """Whether a flag is the one of its name that most commands have."""
    return p.name in SHARED and p.help == SHARED[p.name].help


def _usage(command: Any) -> Iterator[str]:
    for p in command.params:
        if p.name == "help":
            continue
        if p.param_type_name == "argument":
            word = p.metavar or p.name.upper()
        else:
            word = p.opts[0] + ("" if p.is_flag else "=…")
        if getattr(p, "multiple", False) or p.nargs == -1:
            word += " …" if p.param_type_name == "argument" else ""
        yield word if p.required else f"[{word}]"


def _flags(params: list[Any]) -> list[str]:
    rows = ["| | default | variable | |", "|---|---|---|---|"]
    for p in params:
        flags = ", ".join([*p.opts, *p.secondary_opts])
        shown = (p.metavar or p.name.upper()) if p.param_type_name == "argument" else flags
        text = " ".join(p.help.partition(" [env: ")[0].split()).replace("|", "\\|")
        rows.append(f"| `{shown}` | {_default(p)} | {_variable(p)} | {text} |")
    return rows


def _default(p: Any) -> str:
    if p.required:
        return "required"
    if isinstance(p.show_default, str):
        return f"`{p.show_default}`"
    if p.default is None or p.default is False or p.default in ("", [], ()) or callable(p.default):
        return ""
    return f"`{str(p.default).removesuffix('.0')}`"


def _variable(p: Any) -> str:
    named = re.search(r"\[env: (\w+)\]", p.help)
    variable = p.envvar if isinstance(p.envvar, str) else named[1] if named else ""
    return f"`{variable}`" if variable else ""


def _first(text: str | None) -> str:
    """The first paragraph of a help text, as one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


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
    words = shlex.split(line.replace("…", "X"))[1:]
    command = root()
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
    if re.search(r"^notify( [a-z][a-z-]*)+ … ", f"{line} "):  # the line continues from one above it
        return ""
    missing = [p.opts[0] for p in command.params if p.required and given.get(p.name) in (None, (), [])]
    return f"{', '.join(missing)} is missing" if missing else ""
