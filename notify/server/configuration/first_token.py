"""The first token of a registry: made once, by whichever server comes first, and left in that server's directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

from notify.server.access import tokens
from notify.server.access.credential import Credential
from notify.server.configuration.records import Records

log = structlog.get_logger("notify.server")

FILE = "admin.token"
_PENDING = "first-token-"
"""With the credential's id behind it: the file of a token whose credential may not be recorded yet."""


def leave_first_token(records: Records, directory: Path, now_us: int) -> None:
    """Where there is no credential, make one that may administer and view, and leave its token in `directory`.

    Of several servers that do so at once one does, and the others leave no file. The token is on the disk before its
    credential is recorded: a crash in between leaves a file for the next start to clear away, and one behind it a file
    for the next start to put in its place, but never a credential whose token nobody has. Raises OSError, and what the
    database says.
    """
    if not records.credentials():
        number = tokens.new_id()
        token, proof = tokens.new_token(number)
        _write(directory / (_PENDING + number), token)
        records.add_first_credential(Credential(number, "admin", "token", proof, ("admin", "view"), 0, 0, now_us, 0))
    pending = list(directory.glob(_PENDING + "*"))
    if not pending:
        return
    # There is a credential by now, so that a file whose own is not among them is one of a server that came too late.
    recorded = {c.id for c in records.credentials()}
    for path in pending:
        number = path.name.removeprefix(_PENDING)
        if number not in recorded:
            path.unlink(missing_ok=True)
            continue
        with contextlib.suppress(FileNotFoundError):  # another server has the same directory, and was first
            path.replace(directory / FILE)
            records.record(now_us, "notify serve", "credential.add", "admin", "the first token", {"id": number})
            remedy = "make others with it (notify token create), then revoke it"
            log.info("first_token", file=str(directory / FILE), remedy=remedy)


def _write(path: Path, token: str) -> None:
    """Make the file, readable by its owner only, and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
