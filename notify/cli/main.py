"""`notify`: puts the command groups together, and turns every error into one clear line and an exit code."""

from __future__ import annotations

import sys

import click
import typer

from notify import __version__
from notify.errors import NotifyError

app = typer.Typer(
    name="notify",
    help="Transactional messages: a database change and its message happen together, or not at all.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _register() -> None:
    from notify.cli import bench, demo, serve

    serve.register(app)
    bench.register(app)
    demo.register(app)


def main() -> None:
    """Exit codes: 0 good, 1 the answer is bad news, 2 could not run."""
    _register()
    try:
        code = app(standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = 2
    except NotifyError as error:
        typer.echo(f"notify: {error}", err=True)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
