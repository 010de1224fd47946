"""The first token of a registry: the first server makes it, once, and writes it into its data directory."""

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
"""The prefix of a file whose token's credential may not be recorded yet; the credential's id follows."""


def leave_first_token(records: Records, directory: Path, now_us: int) -> None:
    """If there is no credential, make one with the rights admin and view, and write its token into `directory`.

    If several servers do so at the same time, one of them makes the credential, and the others leave no file. The token
    is on the disk before its credential is recorded. After a crash between these steps the next start deletes the file;
    after a later crash it gives the file its final name. So there is never a credential whose token nobody has. Raises
    OSError and the database's errors.
    """
    if not records.credentials():
        number = tokens.new_id()
        token, proof = tokens.new_token(number)
        _write(directory / (_PENDING + number), token)
        records.add_first_credential(Credential(number, "admin", "token", proof, ("admin", "view"), 0, 0, now_us, 0))
    pending = list(directory.glob(_PENDING + "*"))
    if not pending:
        return
    # A credential exists now. So a file whose own credential is not recorded was left by a server that came too late.
    recorded = {c.id for c in records.credentials()}
    for path in pending:
        number = path.name.removeprefix(_PENDING)
        if number not in recorded:
            path.unlink(missing_ok=True)
            continue
        with contextlib.suppress(FileNotFoundError):  # another server with the same directory was faster
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
