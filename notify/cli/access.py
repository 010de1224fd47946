"""`notify token`: credentials of clients and operators."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import typer

from notify.admin_api import server
from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, WIDE, call, fields, show_rows
from notify.cli.printed import say
from notify.cli.writes import add_write, send_write, show_write, write_body
from notify.server.access.rights import ACTIONS


@contextlib.contextmanager
def _new_file(path: Path | None) -> Iterator[TextIO | None]:
    """A new file that only its owner may read, open for writing; it is removed again if nothing was written.

    It is created before the credential: if the file could not be created afterwards, the token would be lost.
    """
    if path is None:
        yield None
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise typer.BadParameter(f"{path} exists: remove it, or name another file") from None
    try:
        with open(handle, "w") as file:
            yield file
    finally:
        if not path.stat().st_size:
            path.unlink()


RIGHTS = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())


group = typer.Typer(no_args_is_help=True)


@group.command("list")
def list_credentials(
    all: bool = typer.Option(False, "--all", help="Also expired and revoked ones."),
    wide: bool = WIDE,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """List credentials: name, rights, expiry."""
    columns = fields("id", "name", "rights", "expires_at", "state")
    answer = call(url, "GET", "credentials", query="?all=true" if all else "")
    show_rows(answer, as_json, "credentials", columns, wide)


@group.command()
def create(
    name: str = typer.Argument(..., help="The name of the service or person."),
    right: list[str] = typer.Option(..., "--right", help=f"ACTION:NAME, repeatable. {RIGHTS}."),
    certificate: str | None = typer.Option(None, help="Instead of a token: the common name of a client certificate."),
    subject: str | None = typer.Option(None, help="Instead of a token: the subject of an identity provider's tokens."),
    days: float = typer.Option(90.0, min=0.001, max=3650, help="Days until it expires."),
    requests: float = typer.Option(0.0, min=0, help="Most requests per second; 0: the setting's value."),
    polls: int = typer.Option(0, min=0, help="Most polls that wait at once; 0: the setting's value."),
    out: Path | None = typer.Option(None, help="Write the token to this new file instead of printing it."),
    reason: str = REASON,
    dry_run: bool = DRY_RUN,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Create a credential. Its token is printed once, or written to a file, and cannot be shown again."""
    if certificate is not None and subject is not None:
        raise typer.BadParameter("give --certificate or --subject, not both")
    fields: dict[str, Any] = {"name": name, "rights": right, "expires_in": days * 86_400}
    fields |= {"requests": requests, "polls": polls}
    if certificate is not None:
        fields |= {"kind": "certificate", "subject": certificate}
    elif subject is not None:
        fields |= {"kind": "subject", "subject": subject}
    with _new_file(out if not dry_run else None) as file:
        answer = send_write(server.CREDENTIAL_ADD, url, body=write_body(reason, dry_run, **fields))
        if file is not None and "token" in answer:
            file.write(answer.pop("token") + "\n")
    show_write(server.CREDENTIAL_ADD.name, answer, as_json)
    if "token" in answer and not as_json:
        say(f"  Its token, which is shown this once: {answer['token']}")


add_write(group, "revoke", server.CREDENTIAL_REVOKE, "Revoke a credential.", id=str)
