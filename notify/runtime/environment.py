"""Settings from files, and from environment variables as they were meant: secrets that were made from files end with a
line feed, and programs that read files of variables, such as Docker with `--env-file`, keep quotation marks."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from notify.errors import InvalidRequest

PREFIX = "NOTIFY_"
QUOTES = "\"'"


def value_of(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of a variable without white space around it; empty if it is not set. Raises InvalidRequest if it is in
    quotation marks."""
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES:
        raise InvalidRequest(
            f"{name} is set to a value in quotation marks ({value[0]}…{value[0]}), which would be a part of the value: "
            "leave them out (Docker's --env-file, for example, keeps them)"
        )
    return value


def strip_all(environ: MutableMapping[str, str]) -> None:
    """Remove the white space around the values of all variables of Notify. Quotation marks stay: an expression or a
    body may begin and end with one."""
    for name in [name for name in environ if name.startswith(PREFIX)]:
        environ[name] = environ[name].strip()


def text_of(setting: str, path: str) -> str:
    """The text of a UTF-8 file. Raises InvalidRequest if it cannot be read; `setting`: the setting with the path."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
        raise InvalidRequest(f"{setting}: {path} cannot be read: {why}") from None
