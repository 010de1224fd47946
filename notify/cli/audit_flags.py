"""The flags that an audit was started with, for the commands in its report that people copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from notify.runtime.urls import without_secrets

if TYPE_CHECKING:
    from notify.spark.causes.commands import Commands
    from notify.spark.result import Inputs

AS_JSON = typer.Option(
    False, "--json", envvar="NOTIFY_JSON",
    help="Print one JSON object on stdout, and nothing else; if the audit fails, the field failed says why.",
)  # fmt: skip
"""Like `--json` of other commands, except that a failure is a kind of verdict here."""
INPUTS = {
    "database": "--database", "log": "--log", "kafka": "--kafka", "storage": "--storage", "report": "--report",
    "scratch": "--scratch", "schema": "--schema", "schemas": "--schemas",
    "records": "--records",
}  # fmt: skip
TIMES = {"max_transaction_seconds": "--max-transaction-seconds", "deliver_seconds": "--deliver-seconds"}
EFFECTS = {"effects": "--effects"}
BOUNDS = {"since": "--from", "to": "--to"}
PATHS = ("log", "report", "scratch", "records")


def commands_of(context: typer.Context, inputs: Inputs) -> Commands:
    """The flags that commands about this audit need. Flags from the environment are left out, because they stay set."""
    from notify.spark.causes.commands import Commands

    flags = context.params
    return Commands(
        tuple(_words(context, INPUTS)),
        tuple(_words(context, TIMES | EFFECTS)),
        tuple(_words(context, BOUNDS)),
        tuple(_words(context, {"url": "--url"})),
        tuple((each.source_id(), each.shown_url, each.named_schema) for each in inputs.databases),
        without_secrets(flags["kafka"][0]) if flags["kafka"] and not flags["log"] else "",
    )


def _words(context: typer.Context, flags: dict[str, str]) -> Iterable[str]:
    for name, flag in flags.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[name]
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            is_path = name in PATHS and "://" not in str(each)
            text = str(Path(each).absolute()) if is_path else without_secrets(str(each))
            yield from (flag, text)
