"""Checkpoints: the state at a frame boundary, so that a start replays only what came after. Two are kept."""

from __future__ import annotations

from typing import Any

from notify.errors import Corrupt
from notify.storage import crash_point
from notify.storage.log.disk import Disk
from notify.storage.log.format import crc32c
from notify.storage.log.state import decode, encode

_MAGIC = b"NTFYCKP1"
_SUFFIX = ".ckpt"


def checkpoint_name(position: int) -> str:
    return f"{position:020d}{_SUFFIX}"


def encoded(state: dict[str, Any], position: int, time_us: int) -> bytes:
    body = encode({"position": position, "time_us": time_us, "state": state})
    return _MAGIC + crc32c(body).to_bytes(4, "little") + len(body).to_bytes(8, "little") + body


def write(disk: Disk, data: bytes, position: int) -> None:
    """Store an encoded checkpoint durably, then drop all but the two newest."""
    crash_point.reached("checkpoint.before_rename")
    disk.replace(checkpoint_name(position), [data])
    names = [name for name in disk.names() if name.endswith(_SUFFIX)]
    for name in names[:-2]:
        disk.unlink(name)


def names_behind(disk: Disk, position: int) -> list[str]:
    """Checkpoints that stand behind a position."""
    own = checkpoint_name(position)
    return [name for name in disk.names() if name.endswith(_SUFFIX) and name > own]


def load(disk: Disk) -> tuple[int, dict[str, Any]] | None:
    """The newest sound checkpoint as (position, state); None for a log that never had one.

    Raises Corrupt if there are some and none is sound.
    """
    names = [name for name in disk.names() if name.endswith(_SUFFIX)]
    complaints = []
    for name in reversed(names):
        fd = disk.open(name)
        try:
            data = disk.read(fd, disk.size(fd), 0)
        finally:
            disk.close(fd)
        body = data[20:]
        if data[:8] != _MAGIC or len(body) != int.from_bytes(data[12:20], "little"):
            complaints.append(f"{name}: cut short or not a checkpoint")
        elif crc32c(body) != int.from_bytes(data[8:12], "little"):
            complaints.append(f"{name}: damaged (checksum)")
        else:
            saved = decode(body)
            return saved["position"], saved["state"]
    if complaints:
        raise Corrupt("no checkpoint can be read: " + "; ".join(complaints))
    return None
