"""`notify backup` copies the log of a running server; `notify restore` makes a data directory from the copy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer
from rich.progress import Progress

from notify.cli.api import AS_JSON, REASON, URL, call, show, write
from notify.client.login import tls_from_environment, token_from_environment
from notify.errors import InvalidRequest, NotifyError, Unavailable

PARTIAL = "restore.partial"
"""Where a restore puts its files until all of them are verified and on the disk."""
CHUNK = 8 << 20
SECONDS = 60


def register(app: typer.Typer) -> None:
    app.command()(backup)
    app.command()(restore)


def backup(
    directory: Path = typer.Argument(..., help="The directory to make for the copy."),
    reason: str = REASON,
    url: str = URL,
    as_json: bool = AS_JSON,
) -> None:
    """Copy a server's log and its record of actions while the server runs."""
    if directory.exists():
        raise InvalidRequest(f"{directory} exists: name a directory that does not exist")
    made = call(url, "POST", "backups", body=write(reason, False))["result"]
    partial = directory.with_name(directory.name + ".partial")
    try:
        total = sum(file["size"] for file in made["files"])
        with Progress(disable=as_json, transient=True) as progress:
            task = progress.add_task("copying", total=total)
            for file in made["files"]:
                _fetch(url, made["name"], file, partial, lambda count: progress.advance(task, count))
        (partial / "backup.json").write_text(json.dumps(made, indent=2) + "\n")
        _sync_all(partial)
        partial.rename(directory)
        _sync(directory.parent)
    finally:
        call(url, "DELETE", "backups", made["name"], body=write(reason, False))
        shutil.rmtree(partial, ignore_errors=True)
    show({"directory": str(directory), "name": made["name"], "files": len(made["files"]), "bytes": total}, as_json)


def _place(directory: Path, name: str) -> Path:
    """The path of a backup's file. Raises InvalidRequest for a name that leads out of the directory.

    Names come from a server or from an archive, and neither is trusted.
    """
    parts = name.split("/")
    is_plain = name.isprintable() and "\\" not in name and all(part not in ("", ".", "..") for part in parts)
    if not is_plain:
        raise InvalidRequest(f"backup: {name[:100]!r} is no valid file name in a backup: nothing was written to it")
    target = directory / name
    if any(place.is_symlink() for place in (target, *target.parents) if directory in place.parents):
        raise InvalidRequest(f"backup: {name[:100]!r} leads elsewhere by a symbolic link: nothing was written to it")
    return target


def _fetch(url: str, name: str, file: dict[str, Any], directory: Path, done: Any) -> None:
    """Fetch a file. Raises Unavailable if it does not come whole."""
    target = _place(directory, file["name"])
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = f"{url.split(',')[0].rstrip('/')}/v1/admin/backups/{quote(name, safe='')}/files/{quote(file['name'])}"
    token = token_from_environment()
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {token}"} if token else {})
    context = tls_from_environment() if address.startswith("https") else None
    size = 0
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer, target.open("wb") as out:
            target.chmod(0o600)
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                size += len(chunk)
                if size > file["size"]:
                    break  # it is longer than the server said
                done(len(chunk))
    except OSError as error:
        raise Unavailable(f"backup: {file['name']} could not be fetched: {error}") from None
    if size != file["size"]:
        raise Unavailable(f"backup: {file['name']} has {file['size']} bytes, {size} came; try again")


def restore(
    directory: Path = typer.Argument(..., help="A directory that `notify backup` made."),
    data_dir: Path = typer.Option(..., "--data-dir", envvar="NOTIFY_DATA_DIR", help="The data directory to make."),
    as_json: bool = AS_JSON,
) -> None:
    """Make a server's data directory from a backup, and verify every checksum."""
    try:
        made = json.loads((directory / "backup.json").read_text())
        expected = {file["name"]: int(file["size"]) for file in made["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{directory} is no backup: backup.json is missing or cannot be read") from None
    partial = data_dir / PARTIAL  # within: a data directory may be a volume of its own, which cannot be renamed
    if data_dir.exists() and any(path != partial for path in data_dir.iterdir()):
        raise InvalidRequest(f"{data_dir} is not empty: name an empty directory, or one that does not exist")
    for name, size in expected.items():
        source = _place(directory, name)
        if not source.is_file() or source.stat().st_size != size:
            raise InvalidRequest(f"{source} is missing, or its size has changed since the backup: take another backup")
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)  # of a restore that was interrupted
    partial.mkdir(mode=0o700)
    for name in expected:
        target = _place(partial, name)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target)
        target.chmod(0o600)
    try:
        facts = asyncio.run(_verified(partial / "log"))
    except NotifyError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidRequest(f"the backup cannot be opened: {error}") from None
    _take_place(partial, data_dir)
    show({"data_dir": str(data_dir), "made": made["name"], **facts}, as_json)
    if facts["damages"]:
        raise typer.Exit(1)


def _take_place(partial: Path, data_dir: Path) -> None:
    """Move a verified copy to where a server looks for it, once all of it is on the disk; the log goes last."""
    _sync_all(partial)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "log"):
        path.rename(data_dir / path.name)
    partial.rmdir()
    _sync(data_dir)
    _sync(data_dir.parent)


def _sync_all(directory: Path) -> None:
    """Wait until every file in a directory is on the disk, and the names of all of them."""
    for path in directory.iterdir():
        if path.is_dir():
            _sync_all(path)
        else:
            _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def _verified(log: Path) -> dict[str, Any]:
    """Open the log as a server would; its counts, and its damages."""
    from notify.clock import wall_clock
    from notify.storage.log import LogStore

    store = LogStore(log)
    await store.open(wall_clock())
    try:
        damages = [str(d) for d in store.damages] + await asyncio.to_thread(store.verify)
        counts = [store.count(t.name, q, *store.bounds(t.name, q)) for t in store.topics() for q in range(t.queues)]
        doubt = await store.in_doubt()
        return {
            "topics": len(store.topics()),
            "messages": sum(counts),
            "undecided": doubt.prepared + doubt.parked,
            "damages": damages,
        }
    finally:
        await store.close()
