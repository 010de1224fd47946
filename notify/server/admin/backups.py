"""Admin routes of backups: snapshots of the log, taken while the server writes, and fetched file by file."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import FileResponse
from pydantic import Field

from notify import __version__
from notify.admin_api.declaration import Write
from notify.errors import Conflict, InvalidRequest, NotFound
from notify.protocol.workers import SHARED
from notify.runtime.threads import in_thread
from notify.server.admin.writes import Asker, Desk, Who
from notify.storage.log import LogStore
from notify.storage.shipped import records

AT_ONCE = 3
"""The most snapshots that may exist: each holds the disk space of segments that the log has dropped since."""
_NAME = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9]{6}Z\Z")
Name = Annotated[str, Field(max_length=32)]


class _Snapshots:
    """The snapshots in a server's data directory."""

    def __init__(self, data_dir: str) -> None:
        self.root = Path(data_dir) / "backups"

    def names(self) -> list[str]:
        """All snapshots, the oldest first."""
        return sorted(path.name for path in self.root.iterdir() if _NAME.match(path.name)) if self.root.exists() else []

    def one(self, name: str) -> Path:
        """The directory of a snapshot. Raises NotFound for an unknown name."""
        directory = self.root / name
        if _NAME.match(name) is None or not directory.is_dir():
            raise NotFound(f"there is no backup {name[:40]!r}")
        return directory

    def files(self, directory: Path) -> list[dict[str, Any]]:
        """The names and sizes, in bytes, of a snapshot's files."""
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        return [{"name": str(path.relative_to(directory)), "size": path.stat().st_size} for path in paths]


def add_routes(routes: APIRouter, desk: Desk) -> None:
    """The routes under `backups`."""
    _views(routes, desk)
    _writes(routes, desk)


def _views(routes: APIRouter, desk: Desk) -> None:
    @routes.get("/backups")
    async def backups() -> dict[str, Any]:
        """List the snapshots."""
        snapshots = _Snapshots(desk.running.core.settings.data_dir)
        sizes = {name: sum(f["size"] for f in snapshots.files(snapshots.root / name)) for name in snapshots.names()}
        return {"backups": [{"name": name, "bytes": size} for name, size in sizes.items()]}

    @routes.get("/backups/{name}/files/{file:path}", response_class=FileResponse)
    async def fetch(name: Name, file: str, asker: Asker) -> FileResponse:
        """Fetch a file of a snapshot; this needs the right `admin`, because the file holds more than `view` shows."""
        asker.check("admin")
        snapshots = _Snapshots(desk.running.core.settings.data_dir)
        directory = snapshots.one(name)
        file_names = {row["name"] for row in snapshots.files(directory)}
        if file not in file_names:
            raise NotFound(f"backup {name} has no file {file[:80]!r}")
        return FileResponse(directory / file, media_type="application/octet-stream")


def _writes(routes: APIRouter, desk: Desk) -> None:
    @routes.post("/backups")
    async def make(write: Write, who: Who) -> dict[str, Any]:
        """Take a snapshot of the log and the admin records; fetch its files, then delete it."""
        store = desk.running.core.store
        if not isinstance(store, LogStore):
            raise InvalidRequest("this server has no log: back its database up with the database's own tools", "no_log")
        name = datetime.now(UTC).strftime("%Y%m%dT%H%M%S-%fZ")
        snapshots = _Snapshots(desk.running.core.settings.data_dir)
        root, directory = snapshots.root, snapshots.root / name
        if root.exists() and sum(1 for path in root.iterdir() if path.is_dir()) >= AT_ONCE:
            raise Conflict(f"there are {AT_ONCE} backups on the server: delete one, since each keeps disk space")

        async def do() -> Any:
            try:
                directory.mkdir(mode=0o700, parents=True)
            except FileExistsError:
                raise Conflict("another backup is being made: try again") from None
            root.chmod(0o700)
            try:
                await store.snapshot(directory / "log")
                await in_thread(_copy_database, Path(desk.running.core.settings.data_dir), directory)
                if desk.running.workers is not None:
                    await in_thread(_copy_database, desk.running.workers.directory, directory / SHARED)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            shard = desk.running.core.settings.shard
            return {"name": name, "version": __version__, "shard": shard, "files": snapshots.files(directory)}

        return await desk.carry_out(write, who, "backup.make", name, do, {"name": name})

    @routes.delete("/backups/{name}")
    async def delete(name: Name, write: Write, who: Who) -> dict[str, Any]:
        """Delete a snapshot, and free the disk space that only this snapshot uses."""
        directory = _Snapshots(desk.running.core.settings.data_dir).one(name)

        async def do() -> Any:
            await in_thread(shutil.rmtree, directory)
            return {"deleted": name}

        return await desk.carry_out(write, who, "backup.delete", name, do, {"name": name})


def _copy_database(data_dir: Path, directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    target = directory / records.NAME
    target.touch(mode=0o600)
    records.copy_into(data_dir, target)
