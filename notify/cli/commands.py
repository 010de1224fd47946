"""The commands of `notify`: the panel of `notify --help` that lists each, its module, and what it is for.

A command's module is imported when the command runs, so that `notify --help` and a command that asks a server do not
wait for the imports of others.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main


@dataclass(frozen=True, slots=True)
class Listed:
    """A command, or a group of commands, as `notify --help` lists it."""

    panel: str
    where: str
    """The module within `notify.cli`, and there the function, or the Typer of a group."""
    text: str


RUN, LOOK, DATA, OPERATE, PROVE = "Run", "Look", "Data", "Operate", "Prove"

COMMANDS = {
    "serve": Listed(RUN, "serve:serve", "Run a server."),
    "bridge": Listed(RUN, "bridge:bridge", "Move committed messages from databases' logs to a queue."),
    "relay": Listed(RUN, "database:relay", "Move outbox messages from a database to a queue."),
    "check": Listed(RUN, "database:check", "Answer checks from a database while its application is down."),
    "overview": Listed(LOOK, "overview:overview", "Show rates, transactions in doubt, lag and alarms."),
    "top": Listed(LOOK, "overview:top", "Show the overview, groups and topics continuously."),
    "alarm": Listed(LOOK, "alarm:group", "Faults that need an operator."),
    "node": Listed(LOOK, "overview:nodes", "Servers, bridges, relays and consumers."),
    "audit-log": Listed(LOOK, "overview:list_actions", "Administrative writes: who changed what, when and why."),
    "doctor": Listed(LOOK, "doctor:doctor", "Check servers, Kafka and databases; each finding says what to do."),
    "topic": Listed(DATA, "topic:group", "Topics and their queues."),
    "group": Listed(DATA, "group:group", "Consumer groups, their subscriptions and positions."),
    "message": Listed(DATA, "message:group", "Show, find and send messages."),
    "transaction": Listed(DATA, "transaction:group", "Transactions in doubt and parked."),
    "dead-letter": Listed(DATA, "dead_letter:group", "Messages that a group failed to handle."),
    "held-key": Listed(
        DATA, "held_key:group", "Keys that a group holds because one of their messages used up its attempts."
    ),
    "schedule": Listed(DATA, "schedule:group", "Messages that are sent by a cron expression or at an interval."),
    "refused": Listed(DATA, "refused:group", "Outbox transactions that the target will never accept unchanged."),
    "settings": Listed(OPERATE, "settings:group", "Settings of all servers of a registry, while they run."),
    "limit": Listed(OPERATE, "limits:group", "Rate limits of topics and groups."),
    "token": Listed(
        OPERATE, "access:group", "Credentials: tokens, client certificates, subjects of an identity provider."
    ),
    "job": Listed(OPERATE, "job:group", "Background jobs of a server."),
    "backup": Listed(OPERATE, "backup:backup", "Copy a server's log while the server runs."),
    "restore": Listed(OPERATE, "restore:restore", "Make a data directory from a backup or an object store."),
    "storage": Listed(OPERATE, "storage:group", "A server's tables in a database: schema, key map, nodes."),
    "store": Listed(OPERATE, "store:group", "Large bodies in an object store."),
    "purge": Listed(OPERATE, "database:purge_rows", "Delete decided rows from a service's half_message table."),
    "audit": Listed(PROVE, "audit:group", "Compare what databases committed with what was delivered and took effect."),
    "demo": Listed(
        PROVE, "demo:demo", "Run a shop whose processes are killed, and prove that nothing is lost or doubled."
    ),
    "bench": Listed(PROVE, "bench.command:group", "Measure this machine; every run is verified."),
}
"""The commands in the order of `notify --help`, by name."""


def load(name: str) -> Any:
    """Import a command and return it. Raises KeyError for an unknown name, ImportError if an extra is missing."""
    listed = COMMANDS[name]
    module, _, member = listed.where.partition(":")
    found = getattr(importlib.import_module(f"notify.cli.{module}"), member)
    part = typer.Typer()
    if isinstance(found, typer.Typer):
        part.add_typer(found, name=name)
    else:
        part.command(name)(found)
    command: Any = typer.main.get_group(part).commands[name]
    command.rich_help_panel, command.short_help = listed.panel, listed.text
    command.help = command.help or listed.text
    shorten_help(command)
    return command


def stand_in(name: str) -> Any:
    """A command without its flags, for a list of commands. Raises KeyError for an unknown name."""
    listed = COMMANDS[name]
    return typer.core.TyperCommand(name, short_help=listed.text, rich_help_panel=listed.panel)


def shorten_help(command: Any) -> None:
    """Let --help show variables only with explicit names, no type of flags without a value, and arguments as NAME."""
    for parameter in command.params:
        _shorten(parameter)
    of_help = command.get_help_option

    def get_help_option(context: Any) -> Any:
        if (option := of_help(context)) is not None:
            _shorten(option)
        return option

    command.get_help_option = get_help_option
    for inner in getattr(command, "commands", {}).values():
        shorten_help(inner)


def _shorten(parameter: Any) -> None:
    if getattr(parameter, "envvar", None) is None:  # the others follow a rule
        parameter.show_envvar = False
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument" and parameter.metavar is None:
        parameter.metavar = parameter.name.upper()  # as in docs/commands.md; typer writes {name}
