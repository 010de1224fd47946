"""Commands of administrative writes. Most are made from the declaration: a flag for each field that has one."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import typer

from notify.admin_api.actor import signed
from notify.admin_api.declaration import AdminWrite, Body, Flag
from notify.admin_api.description import Description
from notify.admin_api.writes import described
from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, pairs, place
from notify.cli.printed import say, say_json, say_paragraph, say_record, say_table

Send = Callable[..., dict[str, Any]]
"""Called as `send_write` is."""
Show = Callable[[AdminWrite, str, dict[str, Any], bool], None]
"""Called with a write, the server's address, the answer, and whether to print JSON."""


def add_write(
    group: typer.Typer,
    command: str,
    write: AdminWrite,
    text: str,
    *,
    send: Send | None = None,
    show: Show | None = None,
    **targets: Any,
) -> None:
    """Add the command of a write to a group. `targets`: the arguments that name what is changed, in the order of the
    path: a type, or `typer.Argument(…)` for a text."""
    flags = list(_flags(write.body))
    parameters = [_parameter("context", typer.Context, ...)]
    parameters += [
        _parameter(name, of, ...) if isinstance(of, type) else _parameter(name, str, of) for name, of in targets.items()
    ]
    parameters += [_parameter(flag.name or f.name, _type(hint, flag), _option(f, flag)) for _, f, flag, hint in flags]
    common = {"reason": (str, REASON), "dry_run": (bool, DRY_RUN), "url": (str, URL), "as_json": (bool, AS_JSON)}
    parameters += [_parameter(name, kind, option) for name, (kind, option) in common.items()]

    def carry_out(context: typer.Context, **values: Any) -> None:
        fields: dict[str, Any] = {}
        for within, f, flag, hint in flags:
            value = values[flag.name or f.name]
            source = context.get_parameter_source(flag.name or f.name)
            is_given = source is not None and source.name != "DEFAULT"
            if is_given or f.default is dataclasses.MISSING:  # otherwise an older server may not know it
                (fields.setdefault(within, {}) if within else fields)[f.name] = _converted(value, hint, flag)
        body = write_body(values["reason"], values["dry_run"], **fields)
        names = [str(values[name]) for name in targets]
        answer = (send or send_write)(write, values["url"], *names, body=body)
        if show is None:
            show_write(write.name, answer, values["as_json"])
        else:
            show(write, values["url"], answer, values["as_json"])

    carry_out.__doc__ = text
    carry_out.__annotations__ = {p.name: p.annotation for p in parameters}
    carry_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.command(command)(carry_out)


def _flags(body: type[Body], within: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Flag, Any]]:
    """The fields with a flag, each with the field of the body that it is in, if any, and its type."""
    hints = typing.get_type_hints(body)
    for f in dataclasses.fields(body):
        hint, flag = hints[f.name], f.metadata["flag"]
        if isinstance(hint, type) and issubclass(hint, Body):
            yield from _flags(hint, f.name)
        elif flag is not None:
            yield within, f, flag, hint


def _type(hint: Any, flag: Flag) -> Any:
    return flag.type or (type(flag.default) if isinstance(flag.default, str | float) else hint)


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _default(f: dataclasses.Field[Any], flag: Flag) -> Any:
    if flag.default is not ...:
        return flag.default
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return ... if f.default is dataclasses.MISSING else f.default


def _option(f: dataclasses.Field[Any], flag: Flag) -> Any:
    if flag.is_argument:
        return typer.Argument(_default(f, flag), min=flag.low, help=flag.help)
    names = [f"--{f.name.replace('_', '-')}"] if f.default is False else []  # without a name there is a --no-… too
    return typer.Option(_default(f, flag), *names, min=flag.low, max=flag.high, help=flag.help)


def option(body: type[Body], field: str) -> Any:
    """The option of one field, for a command with a signature of its own."""
    (f,) = (f for f in dataclasses.fields(body) if f.name == field)
    return _option(f, f.metadata["flag"])


def _converted(value: Any, kind: Any, flag: Flag) -> Any:
    """A flag's value as the body has it: offsets are numbers, and pairs an object."""
    kinds = typing.get_args(kind)
    if any(typing.get_origin(each) is dict for each in kinds):
        return pairs(value)
    if isinstance(value, str) and int in kinds:
        return place(value)
    return value if flag.scale == 1 else value * flag.scale


def write_body(reason: str, dry_run: bool, **fields: Any) -> dict[str, Any]:
    """The body of a write; the user's name is added to the reason."""
    return {"reason": signed(reason), "dry_run": dry_run} | fields


def send_write(write: AdminWrite, url: str, *targets: str, body: dict[str, Any], here: bool = False) -> dict[str, Any]:
    """The answer to a write. `targets`: the names in its path; `here`: see `call`. Raises NotifyError."""
    return call(url, write.method, *write.parts(*targets), body=body, here=here)


def show_write(name: str, answer: dict[str, Any], as_json: bool, *, is_done: bool = True) -> None:
    """Print what a write did, or would do with `dry_run`: as JSON, or in the console's sentences.

    `name`: the write's name in notify/admin_api. `is_done`: whether it had an effect. If a server of another version
    answers in another format, the fields of the answer are printed.
    """
    if as_json:
        say_json(answer)
        return
    target = answer.get("target") or "-"
    done = "done" if is_done else "not done"
    say(f"{'dry run, nothing is changed' if answer['dry_run'] else done}: {target}")
    try:
        description = described(name, target, answer["result"])
    except (KeyError, TypeError, AttributeError):
        description = Description()
    for sentence in description.sentences:
        say_paragraph(sentence, 2)
    if not description.sentences:
        say_record(answer["result"], 2)
    elif description.rows and description.rows.cells:
        say_table([heading.lower() for heading in description.rows.headings], description.rows.cells, 2)
        if description.rows.left_out:
            say_paragraph(f"and {description.rows.left_out:,} more", 2)
