"""`notify`: runs a command, and prints each error as one line with an exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn, TextIO, cast

import typer
import typer.core
import typer.main

from notify import __version__
from notify.cli.commands import COMMANDS, load, shorten_help, stand_in
from notify.cli.error_texts import error_of_database, error_of_file
from notify.cli.printed import ERRORS_AS_JSON, Output, OutputLost, say, say_json
from notify.errors import NotifyError
from notify.runtime.environment import strip_all
from notify.runtime.extras import remedy
from notify.runtime.log_output import STDERR, STDERR_FILE, discard


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
            error = raised if isinstance(raised, NotifyError) else error_of_database(raised) or error_of_file(raised)
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
    """Exit with code 2 if the output cannot be written, because code 1 means bad news."""
    try:
        yield
    except OutputLost as error:
        discard(sys.stdout)
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                say(f"notify: the output cannot be written: {error.strerror}", err=True)
        raise typer.Exit(2) from None


class AllCommands(Commands):
    """Imports a command when it runs or shows its own help."""

    def list_commands(self, _: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        return stand_in(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in COMMANDS and name not in self.commands:
            self.commands[name] = load(name)
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:  # typer suggests only from what is imported
            similar = ", ".join(map(repr, get_close_matches(name, COMMANDS)))
            if similar and "Did you mean" not in getattr(error, "message", "Did you mean"):
                error.message = f"{error.message.rstrip('.')}. Did you mean {similar}?"  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="notify",
    cls=AllCommands,
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


def root_command() -> Any:
    """`notify`, which imports each command when it runs."""
    root: Any = typer.main.get_command(app)
    shorten_help(root)
    return root


@cache
def command() -> Any:
    """`notify` with all its commands imported; a fork server makes it once for all its children."""
    root = root_command()
    for name in COMMANDS:
        root.commands[name] = load(name)
    return root


def main() -> None:
    """Run the command. Exit codes: 0 success, 1 bad news (such as findings), 2 the command could not run.

    Every flag has an environment variable: NOTIFY_BENCH_TRANSACTIONS_CLIENTS is --clients of `notify bench
    transactions`. Flags that several commands share, and settings, have shorter names, which --help shows.
    """
    _open_standard_files()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed the stream: discard the output
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it is used until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print a character that the locale lacks as its number
            with suppress(OSError):  # a stream that was made for a file may be a pipe now
                stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = cast(TextIO, Output(sys.stdout)), cast(TextIO, Output(sys.stderr))
    strip_all(os.environ)
    try:
        (command if command.cache_info().currsize else root_command)()(auto_envvar_prefix="NOTIFY")
    except NotifyError as error:
        _fail(str(error))
    except ImportError as error:
        sentence = remedy(error)
        if sentence is None:
            raise
        _fail(sentence)
    except OutputLost:  # of typer's own sentence about a wrong flag
        discard(sys.stderr)
        sys.exit(2)


def _open_standard_files() -> None:
    """Open the descriptors 0, 1 and 2 that the caller has closed. Otherwise a file of the log would get such a number,
    and what a library writes to standard error would go into that file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR_FILE:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _fail(why: str) -> NoReturn:
    with suppress(OSError):  # the reader of stderr may be gone
        say(f"notify: {why}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
