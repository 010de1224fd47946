"""`notify`: registers the command groups, and prints each error as one line with an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn, TextIO, cast

import typer
import typer.core
import typer.main

from notify import __version__
from notify.cli import of_database, of_files
from notify.cli.printed import ERRORS_AS_JSON, Output, OutputLost, say, say_json
from notify.errors import NotifyError
from notify.runtime.extras import remedy
from notify.runtime.log_output import STDERR, discard
from notify.runtime.signals import end_by


class Commands(typer.core.TyperGroup):
    """All commands. With `--json`, a command's error is also printed as JSON, on stdout."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _output_errors():  # --help prints here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _output_errors():
            return self._run(ctx)

    def _run(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as raised:
            error = (
                raised
                if isinstance(raised, NotifyError)
                else of_database.error_for(raised) or of_files.error_for(raised)
            )
            if error is None:
                raise
            if not ctx.meta.get(ERRORS_AS_JSON):
                if error is raised:
                    raise
                raise error from raised
            say_json({"error": {"code": error.code, "status": error.status, "detail": str(error)}})
        ctx.exit(2)


@contextmanager
def _output_errors() -> Iterator[None]:
    """Exit with code 2 where nobody gets the output: code 1 would say that the answer is bad news."""
    try:
        yield
    except OutputLost as error:
        discard(sys.stdout)
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                say(f"notify: the output cannot be written: {error.strerror}", err=True)
        raise typer.Exit(2) from None


app = typer.Typer(
    name="notify",
    cls=Commands,
    help="Transactional messages: a database change and its message happen together or not at all.",
    epilog="Each flag can be set by a variable: NOTIFY_RELAY_INTERVAL is --interval of `notify relay`.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if context.invoked_subcommand != "serve":
        _log_to_stderr()
        # A command says in one sentence why it failed; commands that run on have a log, which shows the client's lines.
        logging.getLogger("notify.client").addHandler(logging.NullHandler())
    if version:
        say(__version__)
        raise typer.Exit


def _log_to_stderr() -> None:
    """Let the server's code log to stderr: commands that open a log run it, and its log is not part of their output."""
    try:
        import structlog
    except ImportError:  # with the extra cli alone there is no server code to run
        return
    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(cast(TextIO, STDERR)))


def register() -> None:
    """Add every command to `app`."""
    from notify.cli import (
        access,
        alarm,
        audit,
        backup,
        bridge,
        database,
        dead_letter,
        demo,
        doctor,
        group,
        job,
        limits,
        message,
        overview,
        refused,
        restore,
        serve,
        settings,
        storage,
        topic,
        transaction,
    )
    from notify.cli.bench import command as bench

    serve.register(app)
    storage.register(app)
    bridge.register(app)
    topic.register(app)
    group.register(app)
    transaction.register(app)
    message.register(app)
    dead_letter.register(app)
    refused.register(app)
    job.register(app)
    overview.register(app)
    access.register(app)
    alarm.register(app)
    backup.register(app)
    restore.register(app)
    settings.register(app)
    limits.register(app)
    database.register(app)
    doctor.register(app)
    audit.register(app)
    bench.register(app)
    demo.register(app)


@cache
def command() -> Any:
    """`app` with all commands, ready to be called; a fork server makes it once for all its children."""
    register()
    root_command = typer.main.get_command(app)
    hide_long_variables(root_command)
    return root_command


def hide_long_variables(command: Any) -> None:
    """Let --help show only variables with explicit names; those that follow the rule would make it twice as long."""
    for parameter in command.params:
        if getattr(parameter, "envvar", None) is None:
            parameter.show_envvar = False
    for inner in getattr(command, "commands", {}).values():
        hide_long_variables(inner)


def main() -> None:
    """Run the command. Exit codes: 0 success, 1 bad news (such as findings), 2 the command could not run.

    Every flag has an environment variable: NOTIFY_BENCH_TRANSACTIONS_CLIENTS is --clients of `notify bench
    transactions`. Flags that several commands share, and settings, have shorter names, which --help shows.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed the stream: discard the output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it is used until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print a character that the locale lacks as its number
            with suppress(OSError):  # a stream that was made for a file may be a pipe now
                stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = cast(TextIO, Output(sys.stdout)), cast(TextIO, Output(sys.stderr))
    try:
        command()(auto_envvar_prefix="NOTIFY")
    except NotifyError as error:
        _fail(str(error))
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        _fail(sentence)
    except KeyboardInterrupt:  # while the commands were loaded: a command that runs hears of it itself
        end_by(signal.SIGINT)
    except OutputLost:  # of typer's own sentence about a wrong flag
        discard(sys.stderr)
        sys.exit(2)


def _fail(why: str) -> NoReturn:
    with suppress(OSError):  # the reader of stderr may be gone
        say(f"notify: {why}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
