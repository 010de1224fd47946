"""docs/commands.md, made from the parsers of `notify` (see generated_docs.py)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notify.cli import api, main

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
