"""`notify backup` copies the log of a running server; `notify restore` (restore.py) makes a data directory from it."""

from __future__ import annotations

import http.client
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer

from notify.admin_api.writes import WRITES
from notify.cli.api import AS_JSON, REASON, URL, show
from notify.cli.data_directory import place, sync, sync_all
from notify.cli.printed import progress
from notify.cli.writes import send_write, write_body
from notify.client.transport.login import tls_files_from_environment, token_from_environment
from notify.errors import InvalidRequest, Unavailable
from notify.runtime.direct import open_directly

CHUNK = 8 << 20
SECONDS = 60


def backup(
    directory: Path = typer.Argument(..., help="The directory to make for the copy."),
    reason: str = REASON,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Copy a server's log and its record of actions while the server runs."""
    if directory.exists():
        raise InvalidRequest(f"{directory} exists: name a directory that does not exist")
    if "," in url:
        raise InvalidRequest(f"a backup has the log of one server, and --url names several: {url}; back up each one")
    # Here: the files are fetched from the server that has made them.
    manifest = send_write(WRITES["backup.make"], url, body=write_body(reason, False), here=True)["result"]
    partial = directory.with_name(directory.name + ".partial")
    try:
        total = sum(file["size"] for file in manifest["files"])
        with progress(as_json) as shown:
            task = shown.add_task("copying", total=total)
            for file in manifest["files"]:
                _fetch(url, manifest["name"], file, partial, lambda count: shown.advance(task, count))
        (partial / "backup.json").write_text(json.dumps(manifest, indent=2) + "\n")
        sync_all(partial)
        partial.rename(directory)
        sync(directory.parent)
    finally:
        send_write(WRITES["backup.delete"], url, manifest["name"], body=write_body(reason, False), here=True)
        shutil.rmtree(partial, ignore_errors=True)
    show(
        {"directory": str(directory), "name": manifest["name"], "files": len(manifest["files"]), "bytes": total},
        as_json,
    )


def _fetch(url: str, name: str, file: dict[str, Any], directory: Path, done: Any) -> None:
    """Fetch a file. Raises Unavailable if it is incomplete."""
    target = place(directory, file["name"])
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = f"{url.rstrip('/')}/v1/admin/backups/{quote(name, safe='')}/files/{quote(file['name'])}"
    token = token_from_environment()
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {token}"} if token else {})
    context = tls_files_from_environment().context() if address.startswith("https") else None
    size = 0
    try:
        with open_directly(request, SECONDS, context) as answer, target.open("wb") as out:
            target.chmod(0o600)
            while chunk := answer.read(min(CHUNK, file["size"] + 1 - size)):
                size += len(chunk)
                if size > file["size"]:
                    break  # the file is longer than the server announced
                out.write(chunk)
                done(len(chunk))
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"backup: {file['name']} could not be fetched: {error}") from None
    if size != file["size"]:
        raise Unavailable(f"backup: {file['name']} has {file['size']} bytes, {size} came; try again")
