"""How an administrative write is declared: its route, the fields of its body, and their form inputs and flags."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Annotated, Any, Literal, Union
from urllib.parse import quote

from notify.admin_api.description import Description
from notify.errors import InvalidRequest


class FanOut(Enum):
    """Which workers a request is for that names none."""

    HERE = auto()
    """Any worker: the request is about something that all workers share."""
    ALL = auto()
    """All workers; the answers of workers that do not know the name are left out."""
    KNOWING = auto()
    """The worker that knows the id."""
    OF_KEY = auto()
    """The worker of the message's key; without a key, the first worker that has the topic."""
    OF_EACH = auto()
    """For each message of the request one worker."""
    UP_TO = auto()
    """All workers, each for its share of at most `max` rows."""
    JOB = auto()
    """The worker in the job's number."""
    NONE = auto()
    """No worker: the request is about one log, and must be sent to that worker's address."""


# --- fields -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Input:
    """One field of a form. In a body's declaration what is left out follows from the field's name and type.

    `kind`: text, exact (empty text is a value), number, hidden (a number that the page gives), hours (sent as seconds),
    choice, check, list (separated by commas), rates (lines NAME=RATE), pairs (lines NAME=VALUE), body (a message's
    unchanged text)."""

    label: str = ""
    help: str = ""
    kind: str = ""
    choices: tuple[str, ...] = ()
    required: bool = False
    name: str = ""

    def value(self, text: str | None) -> Any:
        """The value of the form's text; None: the field is left out. Raises InvalidRequest."""
        if self.kind == "body":
            return (text or "").replace("\r\n", "\n") or None
        text = (text or "").strip()
        try:
            if self.kind == "exact":
                return text
            if self.kind == "check":
                return True if text else None
            if not text:
                return {} if self.kind in ("rates", "pairs") else None
            if self.kind in ("number", "hidden"):
                return float(text) if "." in text else int(text)
            if self.kind == "list":
                return [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
            if self.kind in ("rates", "pairs"):
                convert = float if self.kind == "rates" else str.strip
                pairs = [line.partition("=") for line in text.splitlines() if line.strip()]
                return {name.strip(): convert(value) for name, _, value in pairs}
            if self.kind == "hours":
                return float(text) * 3600
        except ValueError:
            raise InvalidRequest(f"{self.label}: {text[:60]!r} is not valid. {self.help}") from None
        return text


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, or argument, of a write's command."""

    help: str
    low: float | None = None
    high: float | None = None
    name: str = ""
    """Empty: the field's name."""
    default: Any = ...
    """`...`: the field's default."""
    type: Any = None
    """The flag's type; None: the field's. The command converts texts to the field's type."""
    is_argument: bool = False
    scale: float = 1
    """By which the flag's number is multiplied."""


class Bounds:
    """Bounds of a type within an annotation, as pydantic's core names them."""

    def __init__(self, **bounds: Any) -> None:
        self.bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return handler(source) | self.bounds


StrictInt = Annotated[int, Bounds(strict=True)]
StrictBool = Annotated[bool, Bounds(strict=True)]
Instant = Annotated[datetime, Bounds(tz_constraint="aware")]
"""An instant with its time zone."""


def declared(
    default: Any = dataclasses.MISSING,
    description: str | None = None,
    *,
    input: Input | None = None,
    flag: Flag | None = None,
    **bounds: Any,
) -> Any:
    """A field of a body, with its input and flag if console and command have it. Without `default` it is required.

    `bounds`: those of pydantic's fields: `ge`, `le`, `gt`, `min_length`, `max_length`, `pattern`; and `examples`.
    """
    metadata = {"input": input, "flag": flag, "of": bounds | {"description": description}}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Body:
    """An object of a request. pydantic validates it: a field that is not declared is refused."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic import ConfigDict, Field, create_model  # only pydantic calls this
        from pydantic_core import core_schema

        hints = typing.get_type_hints(cls, include_extras=True)
        fields: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            default = {} if f.default is dataclasses.MISSING else {"default": f.default}
            if f.default_factory is not dataclasses.MISSING:
                default = {"default_factory": f.default_factory}
            fields[f.name] = (hints[f.name], Field(**default, **f.metadata.get("of", {})))
        own_text = cls.__doc__ if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(") else None
        model = create_model(
            cls.__name__, __config__=ConfigDict(extra="forbid"), __doc__=own_text, __module__=cls.__module__, **fields
        )

        def as_body(validated: Any) -> Body:
            return cls(**{name: getattr(validated, name) for name in fields})

        return core_schema.no_info_after_validator_function(as_body, handler.generate_schema(model))

    def given(self, *left_out: str) -> dict[str, Any]:
        """The fields that are not None, by name, without those of every write and those `left_out`."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("reason", "dry_run", *left_out)]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class Write(Body):
    """The fields of every write: its reason, and whether it is a dry run.

    What `Spread` reads of a body, too, has a strict type: it must not mean something else to the route.
    """

    reason: str = declared(min_length=1, max_length=1000, examples=["the mailer is fixed"])
    dry_run: StrictBool = declared(False, "say what would be done, and change nothing")


def inputs_of(body: type[Body], *names: str) -> tuple[Input, ...]:
    """The inputs of a body's fields; with `names`, of these only. A field without a default is required."""
    hints = typing.get_type_hints(body)
    return tuple(
        Input(
            input.label or f.name.replace("_", " ").capitalize(), input.help, input.kind or _kind_of(hints[f.name]),
            input.choices or _choices_of(hints[f.name]), input.required or _is_required(f), f.name,
        )
        for f in dataclasses.fields(body)
        if (input := f.metadata["input"]) is not None and (not names or f.name in names)
    )  # fmt: skip


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _kinds(hint: Any) -> list[Any]:
    """The types of a field that may be left out, without None."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union else [hint]
    return [part for part in parts if part is not type(None)]


def _kind_of(hint: Any) -> str:
    (kind, *others) = _kinds(hint)
    by_type = {bool: "check", int: "number", float: "number", list: "list", Literal: "choice"}
    if typing.get_origin(kind) is dict:
        return "pairs" if typing.get_args(kind)[1] is str else "rates"
    return "text" if others else by_type.get(typing.get_origin(kind) or kind, "text")


def _choices_of(hint: Any) -> tuple[str, ...]:
    (kind, *_) = _kinds(hint)
    if typing.get_origin(kind) is not Literal:
        return ()
    return (*[""] * (kind is not hint), *typing.get_args(kind))


# --- writes -----------------------------------------------------------------------------------------------------

Describe = Callable[[str, Mapping[str, Any]], Description]
"""Called with the write's target and the answer's `result`."""


@dataclass(frozen=True, slots=True)
class AdminWrite:
    """One write: its admin route, its body, and how the console shows it."""

    name: str
    method: str
    path: str
    """The path under /v1/admin, with targets in braces."""
    body: type[Body] = Write
    fan_out: FanOut = FanOut.ALL
    describe: Describe | None = None
    """Makes the sentences of the preview and of the result; None: the fields of the answer are shown."""
    title: str = ""
    """The title of the console's form; empty: the console has none."""
    warning: str = ""
    """The warning that the form shows."""
    back: str = "/"
    """The console's page to continue with, with targets in braces."""
    chosen: tuple[Input, ...] | None = None
    """The form's inputs; None: those of the body."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the form always sends."""
    at: str = ""
    """The request's field that contains the inputs; empty: each input is a field of the request."""
    extra: tuple[Input, ...] = ()
    """Inputs that are always fields of the request; the form shows them last."""
    shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Makes the request's fields from the inputs' values; None: the values are the fields."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        return inputs_of(self.body) if self.chosen is None else self.chosen

    @property
    def targets(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"\{(\w+)\}", self.path)

    def parts(self, *targets: str) -> list[str]:
        """The parts of the path with these targets."""
        names = iter(targets)
        return [next(names) if part.startswith("{") else part for part in self.path.split("/")]

    def path_to(self, *targets: str) -> str:
        """The path with these targets, quoted."""
        return "/".join(quote(part, safe="") for part in self.parts(*targets))

    def sent(self, form: Mapping[str, str]) -> dict[str, Any]:
        """The request's fields from a form. Raises InvalidRequest for an input that is missing or not valid."""
        fields = _values(self.inputs, form)
        if self.shape is not None:
            fields = self.shape(fields)
        return dict(self.fixed) | ({self.at: fields} if self.at else fields) | _values(self.extra, form)


def _values(inputs: Sequence[Input], form: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in inputs:
        value = item.value(form.get(item.name))
        if value is None and item.required:
            raise InvalidRequest(f"{item.label} is missing. {item.help}")
        if value is not None:
            values[item.name] = value
    return values
