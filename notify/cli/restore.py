"""`notify restore` makes a server's data directory from a backup, or from the store that a server ships to."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import typer

from notify.cli.api import AS_JSON, show
from notify.cli.data_directory import begun, facts_of, place, sync, take_place
from notify.cli.printed import progress
from notify.errors import InvalidRequest, NotifyError
from notify.protocol.workers import MOST, SHARED, refuse_divided, worker_names
from notify.server.data_directory import SHARD, put_file


def restore(
    directory: Path | None = typer.Argument(None, help="A directory that `notify backup` made."),
    data_dir: Path = typer.Option(..., "--data-dir", envvar="NOTIFY_DATA_DIR", help="The data directory to make."),
    store: str = typer.Option(
        "", "--from", help="Instead of a directory, the URL of the store that a server ships to."
    ),
    until: int | None = typer.Option(
        None, help="With --from: give up everything after this position of the log, because the store has lost some."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Make a server's data directory from a backup or a store, and verify every checksum.

    From a store, the log continues as a new generation: the server that shipped there before stops shipping.

    If a restore was interrupted, repeat it: it continues with the files that it has.
    """
    if (directory is None) == (not store):
        raise InvalidRequest("name a backup's directory, or a store with --from")
    data_dir = data_dir.expanduser()  # as `notify serve` does
    if directory is not None:
        if until is not None:
            raise InvalidRequest("--until is only for a store: a backup is always complete")
        facts = _of_backup(directory, data_dir)
    else:
        facts = _of_store(store, data_dir, until, as_json)
    show({"data_dir": str(data_dir), **facts}, as_json)
    if facts["damages"]:
        raise typer.Exit(1)


def _of_backup(directory: Path, data_dir: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / "backup.json").read_text())
        expected = {file["name"]: int(file["size"]) for file in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InvalidRequest(f"{directory} is not a backup: backup.json is missing or cannot be read") from None
    for name, size in expected.items():
        source = place(directory, name)
        if not source.is_file() or source.stat().st_size != size:
            raise InvalidRequest(f"{source} is missing, or its size has changed since the backup: take another backup")
    refuse_divided(data_dir, "restore --data-dir")
    _refuse_another_workers(data_dir, manifest.get("shard"))
    partial = begun(data_dir)
    for name in expected:
        target = place(partial, name)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(directory / name, target)
        target.chmod(0o600)
    if isinstance(shard := manifest.get("shard"), str):
        put_file(partial / SHARD, shard.encode())
    try:
        facts = asyncio.run(facts_of(partial / "log"))
    except NotifyError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InvalidRequest(f"the backup cannot be opened: {error}") from None
    take_place(partial, data_dir)
    _place_shared(data_dir)
    return {"made": manifest["name"], **facts}


def _refuse_another_workers(data_dir: Path, shard: object) -> None:
    """Raises InvalidRequest if the backup of one worker would go to the directory of another, which has other keys.

    `shard`: the shard in the backup; None in a backup of an earlier version.
    """
    name = data_dir.absolute().name
    if isinstance(shard, str) and name != shard and {name, shard} <= set(worker_names(MOST)):
        raise InvalidRequest(
            f"the backup is from {shard}, which has other keys: restore it to {data_dir.parent / shard}"
        )


def _place_shared(data_dir: Path) -> None:
    """Copy the files that all workers share from a worker's backup to the directory above it, unless they exist
    there."""
    shared = data_dir / SHARED
    if not shared.is_dir():
        return
    for path in shared.iterdir():
        target = data_dir.absolute().parent / path.name
        if not target.exists():
            put_file(target, path.read_bytes())  # no rename: the worker's directory may be on a disk of its own
    shutil.rmtree(shared)
    sync(data_dir)
    sync(data_dir.absolute().parent)


def _of_store(url: str, data_dir: Path, until: int | None, quiet: bool) -> dict[str, Any]:
    from notify.object_store.store import Store
    from notify.protocol.wire import instant
    from notify.runtime.clock import wall_clock
    from notify.storage.shipped.restoring import Restoring

    refuse_divided(data_dir, "restore --data-dir")
    store = Store(url)
    partial = begun(data_dir, goes_on=True)
    restoring = Restoring(store, partial, until)
    total = restoring.prepare()
    free = shutil.disk_usage(partial).free
    if total > free:
        raise InvalidRequest(f"{data_dir} has room for {free:,} bytes, but the restore needs {total:,}: make room")
    with progress(quiet) as shown:
        task = shown.add_task("fetching", total=total)
        restoring.fetch(lambda size: shown.advance(task, size))
    restored = asyncio.run(restoring.finish(wall_clock()))
    facts = asyncio.run(facts_of(partial / "log", reads_all=False))
    take_place(partial, data_dir)
    return {
        "from": url,
        "lineage": restored.lineage,
        "generation": restored.generation,
        "position": restored.position,
        "known_to": instant(restored.known_to_us),
        "segments": restored.segments,
        "bytes": restored.bytes,
        "complaints": restored.complaints,
        **facts,
    }
