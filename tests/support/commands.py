"""Running a command in the test's own process: the same code as `notify …`, without a second of imports each time."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from notify.cli import main
from notify.errors import NotifyError


@cache
def registered() -> None:
    main._register()


def cli(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what was printed: its JSON, or `{"text": …}`."""
    registered()
    result: Result = CliRunner().invoke(main.app, list(words), auto_envvar_prefix="NOTIFY")
    if isinstance(result.exception, NotifyError):
        return 2, {"text": f"notify: {result.exception}"}
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"text": result.output}
