"""The files of a log that a server ships to an object store, as its manifest lists them.

This process reads the manifest, and uses its times, sizes and checksums instead of the segments' headers. Workers fetch
the objects in pieces, and check the checksum of each object while they read it.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from notify.errors import Corrupt, InvalidRequest, ObjectStoreFailed
from notify.object_store.store import ObjectMissing, Store
from notify.spark.inputs.log_files import SegmentFile
from notify.storage.log import checkpoint
from notify.storage.log.checkpoint import Checkpoint
from notify.storage.log.disk import Disk
from notify.storage.log.sealed import SealedPart
from notify.storage.shipped import layout, manifest
from notify.storage.shipped.manifest import ShippedSegment
from notify.storage.shipped.records import NAME as RECORDS

_PIECE_BYTES = 8 << 20
_CHECKPOINTS = 2
"""How many of the newest checkpoints are tried; a server keeps as many."""
MOST_NAMED = 20
"""The most missing objects that are named one by one."""


class StoreDisk(Disk):
    """Reads objects of a store as files, and computes their checksums while it reads them from the beginning."""

    def __init__(self, store: Store, sizes: Mapping[str, int]) -> None:
        """`sizes`: the sizes of the objects, by name."""
        self._store = store
        self._sizes = sizes
        self._names: list[str] = []
        self._hashed: dict[str, _Hashed] = {}

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def open(self, name: str, create: bool = False) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(name)
        self._names.append(name)
        return len(self._names) - 1

    def close(self, fd: int) -> None:
        """Does nothing: no object is held open."""

    def size(self, fd: int) -> int:
        return self._sizes[self._names[fd]]

    def read(self, fd: int, size: int, offset: int) -> bytes:
        name = self._names[fd]
        data = self._store.read_range(name, offset, min(size, self._sizes[name] - offset))
        self._hashed.setdefault(name, _Hashed()).take(data, offset)
        return data

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """Does nothing: a store has no such call."""

    def hashed(self, name: str) -> _Hashed:
        """The checksums of a whole object. Reads the bytes that were not read yet."""
        fd, hashed = self.open(name), self._hashed.setdefault(name, _Hashed())
        while self.read(fd, _PIECE_BYTES, hashed.size):
            pass
        return hashed


class _Hashed:
    """Checksums of an object's first `size` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self.crc = 0
        self._sha256 = hashlib.sha256()

    def take(self, data: bytes, offset: int) -> None:
        if offset <= self.size < offset + len(data):
            new = data[self.size - offset :]
            self.crc = google_crc32c.extend(self.crc, new)
            self._sha256.update(new)
            self.size += len(new)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


@dataclass(frozen=True)
class ShippedFiles:
    """The log in a store. The pickled form, for workers, has no list: each task has its segment."""

    url: str
    lineage: str
    dropped_to: int
    listed: tuple[SegmentFile, ...] = field(default=(), repr=False)
    newest: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    """The names and sizes of the newest checkpoints."""
    end: int = 0
    """The position after the last listed byte."""
    generation: int = 0

    is_immutable = True

    @classmethod
    def of(cls, url: str) -> ShippedFiles:
        """Reads the manifest. Raises InvalidRequest if there is no manifest, and ObjectStoreFailed."""
        store = Store(url)
        listed = manifest.load(store)
        if listed is None:
            raise InvalidRequest(
                f"{url} has no log: there is no {layout.MANIFEST}; name the URL that a server was given with --ship-to"
            )
        files: list[SegmentFile] = []
        newest: deque[tuple[str, int]] = deque(maxlen=_CHECKPOINTS)
        before: ShippedSegment | None = None
        for segment in manifest.segments_from(store, listed):  # reads a page at a time
            if before is not None:
                files.append(_file(before, segment))
            if segment.checkpoint is not None:
                newest.append((segment.checkpoint_name, segment.checkpoint.size))
            before = segment
        if before is not None:
            files.append(_file(before, None))
        return cls(
            store.url, listed.lineage, listed.dropped_to, tuple(files), tuple(newest), listed.end, listed.generation
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ShippedFiles, (self.url, self.lineage, self.dropped_to)

    @cached_property
    def _store(self) -> Store:
        return Store(self.url)

    @property
    def place(self) -> str:
        return self.url

    @property
    def identity(self) -> str:
        return f"{self.lineage} {self.url}"

    @property
    def nothing(self) -> str:
        return f"{layout.MANIFEST} lists no segment yet: a server ships one at most every --ship-every seconds"

    def segments(self) -> tuple[list[SegmentFile], list[str]]:
        stored = set(self._store.names("segments"))
        files = [segment for segment in self.listed if segment.name in stored]
        missing = [segment.name for segment in self.listed if segment.name not in stored]
        problems = [f"{name} is in the manifest, and not in the store {self.url}" for name in missing[:MOST_NAMED]]
        if len(missing) > MOST_NAMED:
            problems.append(f"{len(missing) - MOST_NAMED} more segments are not in the store {self.url}")
        if why := self._outdated(stored):
            problems.append(why)
        return files, problems

    def _outdated(self, stored: Iterable[str]) -> str:
        """Why the manifest is an earlier one than that of these objects; "" if it may be the newest.

        A server ships one segment after the other, so that a crash leaves at most one that is not listed.
        """
        behind = sorted(found for name in stored if (found := layout.log_of(name)) is not None and found[0] >= self.end)
        newer = max((generation for _, generation in behind), default=0)
        if len(behind) <= 1 and newer <= self.generation:
            return ""
        now = manifest.load(self._store)
        if now is not None and (now.end, now.generation) != (self.end, self.generation):
            return ""  # the server has shipped them since the manifest was read
        return (
            f"{layout.MANIFEST} in {self.url} is not the newest: it is of generation {self.generation} and ends at "
            f"byte {self.end}. Later segments, which were not read: {len(behind)}, of generations up to {newer}. "
            f"Put the newest {layout.MANIFEST} back, or restart the server that ships there: it lists them again"
        )

    def gone(self) -> str:
        now = manifest.load(self._store)
        if now is None or now.dropped_to <= self.dropped_to:
            return ""
        return (
            f"since the segments were listed, the server has dropped those before byte {now.dropped_to} from "
            f"{self.url} because of their age (ship_keep): repeat this to read the present segments"
        )

    def is_served(self) -> bool:
        """False: the server writes its log elsewhere, and the shipped log ends with its last listed segment."""
        return False

    def disk(self, segment: SegmentFile) -> Disk:
        return StoreDisk(self._store, {segment.name: segment.size})

    def crc_of(self, disk: Disk, segment: SegmentFile) -> int:
        assert isinstance(disk, StoreDisk)
        hashed = disk.hashed(segment.name)
        if (hashed.size, hashed.sha256) != (segment.size, segment.sha256):
            raise ObjectStoreFailed(
                f"its bytes in {self.url} differ from the manifest ({hashed.size} of {segment.size} bytes, "
                f"SHA-256 {hashed.sha256[:12]}… instead of {segment.sha256[:12]}…): it was not read"
            )
        return hashed.crc

    def entries(self, segment: SegmentFile) -> NDArray[np.void] | None:
        name, size, sha256 = segment.index
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / Path(name).name
            try:
                with path.open("wb") as file:
                    if self._store.copy_to(name, file, size) != (size, sha256):
                        return None
                # The mapping outlives the file's name.
                return SealedPart(Disk(path.parent), path.name).entries
            except (ObjectStoreFailed, ValueError):
                return None

    def checkpoint(self) -> Checkpoint | None:
        complaints = []
        for name, size in reversed(self.newest):
            try:
                return checkpoint.load(StoreDisk(self._store, {name: size}))
            except (Corrupt, ObjectMissing) as error:
                complaints.append(f"{name}: {error}")
        if complaints:
            raise Corrupt(f"no checkpoint in the store {self.url} can be read: " + "; ".join(complaints))
        return None

    def checkpoints(self) -> Sequence[int]:
        return ()  # the manifest always ends after the newest checkpoint

    def created_us(self, base: int) -> int:
        return self._at(base).created_us

    def size_of(self, base: int) -> int:
        return self._at(base).size

    def checksum(self, base: int, size: int) -> int:
        segment = self._at(base)
        disk = StoreDisk(self._store, {segment.name: min(size, segment.size)})
        return disk.hashed(segment.name).crc

    @contextmanager
    def administration(self) -> Iterator[Sequence[Path]]:
        listed = manifest.load(self._store)
        if listed is None or listed.records is None:
            yield ()
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / RECORDS
            with path.open("wb") as file:
                self._store.copy_to(listed.records.name, file, listed.records.object.size)
            yield [path]

    @cached_property
    def _by_base(self) -> dict[int, SegmentFile]:
        return {segment.base: segment for segment in self.listed}

    def _at(self, base: int) -> SegmentFile:
        if base not in self._by_base:
            raise FileNotFoundError(layout.log_name(base, 0))
        return self._by_base[base]


def _file(segment: ShippedSegment, following: ShippedSegment | None) -> SegmentFile:
    return SegmentFile(
        segment.log_name,
        segment.base,
        segment.created_us,
        segment.end,
        segment.log.size,
        int(segment.log.sha256[:15], 16),
        segment.log.sha256,
        (segment.index_name, segment.idx.size, segment.idx.sha256),
        following.created_us if following is not None else 1 << 62,
    )
