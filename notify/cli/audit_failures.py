"""Makes `notify audit` fail with one line that says why, and never with exit code 1, which means findings."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from notify.cli.printed import OutputLost, say, say_json
from notify.errors import NotifyError, Unavailable
from notify.runtime.extras import remedy
from notify.runtime.log_output import discard


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn errors of Spark, files and databases, and a missing extra, into Unavailable with one line."""
    try:
        yield
    except (NotifyError, OutputLost):
        raise
    except OSError as error:
        raise Unavailable(f"the audit could not be finished: {error}") from error
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        raise Unavailable(sentence) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j", "sqlalchemy"):
            raise
        raise Unavailable(f"the audit could not be finished: {cause_of(error)}") from error


@contextmanager
def never_one(as_json: bool) -> Iterator[None]:
    """Exit with code 2 if the audit cannot run, fails, or cannot print its result, because 1 means findings.

    With `as_json` the reason is in the JSON. Put the whole command inside this context.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except NotifyError as error:
        _say_failed(as_json, str(error))
        raise
    except KeyboardInterrupt:
        _say_failed(as_json, "interrupted")
        raise typer.Exit(2) from None
    except OutputLost as error:
        discard(sys.stdout)
        with suppress(OSError):
            say(f"notify: the result could not be printed: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception as error:
        with suppress(OSError):
            traceback.print_exc()
        _say_failed(as_json, f"a fault of the audit itself: {error!r}")
        raise typer.Exit(2) from None


def _say_failed(as_json: bool, why: str) -> None:
    if as_json:
        try:
            say_json({"verdict": "", "failed": why, "exit_code": 2})
        except OutputLost:
            discard(sys.stdout)


def cause_of(error: Exception) -> str:
    """The innermost cause that Spark names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by:")]
    return (causes[-1] if causes else lines[0] if lines else repr(error))[:500]
