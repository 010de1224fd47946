"""How `notify audit` fails: with one line that says why, and never with the exit code that stands for findings."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click
import typer

from notify.cli.printed import say_json
from notify.errors import NotifyError, Unavailable


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn errors of Spark, files and databases into Unavailable with one line."""
    try:
        yield
    except NotifyError:
        raise
    except OSError as error:
        raise Unavailable(f"the audit could not be finished: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j", "sqlalchemy"):
            raise
        raise Unavailable(f"the audit could not be finished: {cause_of(error)}") from error


@contextmanager
def never_one(as_json: bool) -> Iterator[None]:
    """Exit code 2 if the audit cannot run or fails, with the reason in the JSON: 1 says that it found something."""
    try:
        yield
    except NotifyError as error:
        if as_json:
            say_json({"verdict": "", "failed": str(error), "exit_code": 2})
        raise
    except KeyboardInterrupt:
        if as_json:
            say_json({"verdict": "", "failed": "interrupted", "exit_code": 2})
        raise typer.Exit(2) from None
    except Exception as error:
        if isinstance(error, click.exceptions.Exit | click.ClickException):
            raise
        traceback.print_exc()
        if as_json:
            say_json({"verdict": "", "failed": f"a fault of the audit itself: {error!r}", "exit_code": 2})
        raise typer.Exit(2) from None


def cause_of(error: Exception) -> str:
    """The innermost cause that Spark names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by:")]
    return (causes[-1] if causes else lines[0] if lines else repr(error))[:500]
