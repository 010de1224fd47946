"""`shipping.json` in a data directory: the lineage of its log, and its generation.

It is made when the log is first shipped, and by a restore. A server without it refuses a store that already has a
manifest, because that belongs to another log.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec

from notify.errors import Corrupt
from notify.protocol.wire import UNDECODABLE
from notify.storage.log.disk import Disk

NAME = "shipping.json"


class Identity(msgspec.Struct, frozen=True):
    """Which log this is a copy of."""

    lineage: str
    """A UUID that all copies of a log share."""
    generation: int = 1
    """Rises by one at each restore."""
    stores: tuple[str, ...] = ()
    """URLs where a manifest of it was seen: if it is missing there later, it was lost, or its disk is not mounted."""


def new() -> Identity:
    return Identity(str(uuid.uuid4()))


def read(data_dir: Path) -> Identity | None:
    """The identity of a data directory's log; None if it was never shipped. Raises Corrupt or OSError."""
    path = data_dir / NAME
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Identity)
        uuid.UUID(found.lineage)
    except FileNotFoundError:
        return None
    except (*UNDECODABLE, ValueError) as error:
        raise Corrupt(
            f"{path} cannot be read ({error}). It names the log's lineage: take lineage and generation from "
            "the manifest.json of the store that this log was shipped to"
        ) from None
    return found


def write(data_dir: Path, identity: Identity) -> None:
    """Store it durably. Raises OSError."""
    Disk(data_dir).replace(NAME, [msgspec.json.encode(identity) + b"\n"])
