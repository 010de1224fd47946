"""`notify token`: whom servers let in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from notify.cli.api import AS_JSON, DRY_RUN, REASON, URL, call, show, write
from notify.server.access.rights import ACTIONS

RIGHTS = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Whom servers let in: tokens, certificates, subjects of an identity provider.")
    app.add_typer(group, name="token", no_args_is_help=True)

    @group.command("list")
    def list_credentials(
        all: bool = typer.Option(False, "--all", help="Those that are over, too."),
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Who may come in, with which rights, until when."""
        show(call(url, "GET", "credentials", query="?all=true" if all else ""), as_json, "credentials")

    @group.command()
    def create(
        name: str = typer.Argument(..., help="Whom it stands for: a service or a person."),
        right: list[str] = typer.Option(..., "--right", help=f"ACTION:NAME, repeatable. {RIGHTS}."),
        certificate: str | None = typer.Option(None, help="No token: this common name of a client certificate."),
        subject: str | None = typer.Option(None, help="No token: this subject of the identity provider's tokens."),
        days: float = typer.Option(90.0, min=0.001, max=3650, help="Until it expires."),
        requests: float = typer.Option(0.0, min=0, help="Requests a second; 0: as the settings say."),
        polls: int = typer.Option(0, min=0, help="Polls that may wait at once; 0: as the settings say."),
        out: Path | None = typer.Option(None, help="Leave the token in this new file, and do not print it."),
        reason: str = REASON,
        dry_run: bool = DRY_RUN,
        url: str = URL,
        as_json: bool = AS_JSON,
    ) -> None:
        """Let someone in. The token is printed once, or left in a file, and cannot be shown again."""
        if certificate is not None and subject is not None:
            raise typer.BadParameter("give --certificate or --subject, not both")
        fields: dict[str, Any] = {"name": name, "rights": right, "expires_in": days * 86_400}
        fields |= {"requests": requests, "polls": polls}
        if certificate is not None:
            fields |= {"kind": "certificate", "subject": certificate}
        elif subject is not None:
            fields |= {"kind": "subject", "subject": subject}
        if out is not None and out.exists():
            raise typer.BadParameter(f"{out} is there already: remove it, or name another file")
        answer = call(url, "POST", "credentials", body=write(reason, dry_run, **fields))
        if out is not None and "token" in answer:
            with open(out, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(answer.pop("token") + "\n")
        show(answer, as_json)

    @group.command()
    def revoke(id: str, reason: str = REASON, dry_run: bool = DRY_RUN, url: str = URL, as_json: bool = AS_JSON) -> None:
        """Let nobody in with it any more."""
        show(call(url, "POST", "credentials", id, "revoke", body=write(reason, dry_run)), as_json)
