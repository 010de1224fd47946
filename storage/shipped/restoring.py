"""A data directory made of what a store holds: the files are fetched, the log is opened once, and is a new generation.

What was stored after the last shipped segment is not in it (docs/backup.md, "A disk is lost").
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from notify.errors import Conflict, Corrupt, InvalidRequest, ObjectStoreFailed
from notify.object_store.store import Store
from notify.protocol.wire import instant
from notify.storage.log import LogStore, checkpoint
from notify.storage.log.disk import Disk
from notify.storage.log.index import index_name
from notify.storage.log.restored_start import begin_at_the_end, last_frame_us
from notify.storage.log.segments import segment_name
from notify.storage.shipped import identity, manifest, records
from notify.storage.shipped.manifest import Manifest, ShippedSegment, StoredObject
from notify.storage.shipped.retention import IDS_US, first_needed

LOG = "log"
TRIES = 2
"""How often an object is fetched whose content is not the one that the manifest tells of."""


@dataclass(slots=True)
class Restored:
    """A restore that is done."""

    lineage: str
    generation: int
    """The generation of the log from now on."""
    position: int
    """Where the shipped log ends, and the restored one goes on."""
    known_to_us: int
    """When the last that is known was written, in microseconds since 1970: what was stored later is lost."""
    segments: int = 0
    bytes: int = 0
    complaints: list[str] = field(default_factory=list)
    """Objects that the store did not have, or not whole, and that the log can do without; damage from before."""


class Restoring:
    """One restore, from a store into an empty directory. To repeat it goes on with the files that are there."""

    def __init__(self, store: Store, directory: Path, until: int | None = None) -> None:
        """`until`: take only what lies before this position, where a segment ends."""
        self._store = store
        self._directory = directory
        self._disk = Disk(directory / LOG)
        self._until = until
        self._complaints: list[str] = []

    def prepare(self) -> int:
        """Look at the store, and choose what to fetch; how many bytes that is.

        Raises InvalidRequest where nothing was shipped there, ObjectStoreFailed where what is needed is missing.
        """
        self._disk.make()
        found = manifest.load(self._store)
        if found is None or not found.count:
            raise InvalidRequest(f"nothing was shipped to {self._store.url}: name the URL that its server ships to")
        self._manifest = found if self._until is None else _cut(self._store, found, self._until)
        listed = list(manifest.segments_from(self._store, self._manifest))
        self._chosen = self._needed(listed)
        self._refuse_missing()
        return sum(segment.log.size + segment.idx.size for segment in self._chosen)

    def fetch(self, progress: Callable[[int], object] = lambda size: None) -> None:
        """Fetch the chosen files that are not here yet; `progress` is told the bytes of each.

        Raises ObjectStoreFailed for a segment that the store lacks or holds damaged, and says what can still be had.
        """
        wanted = {checkpoint.checkpoint_name(self._checkpoint_at)} if self._checkpoint_at else set()
        for segment in self._chosen:
            wanted |= {segment_name(segment.base), index_name(segment.base)}
        for name in self._disk.names():
            if name not in wanted:
                self._disk.unlink(name)
        for segment in self._chosen:
            try:
                self._one(segment.log_name, segment.log, segment_name(segment.base))
            except ObjectStoreFailed as error:
                raise self._lost(segment, str(error)) from None
            progress(segment.log.size)
            try:
                self._one(segment.index_name, segment.idx, index_name(segment.base))
            except ObjectStoreFailed as error:
                self._complaints.append(f"{error}; it was built again from its segment")
            progress(segment.idx.size)
        shipped = self._manifest.records
        why = "no administrators' records were shipped"
        if shipped is not None:
            try:
                self._fetch(shipped.name, shipped.object, self._directory / records.NAME)
                return
            except ObjectStoreFailed as error:
                why = f"the administrators' records are lost: {error}"
        self._complaints.append(f"{why}; settings, limits and tokens are new")

    async def finish(self, now_us: int) -> Restored:
        """Open the log, take its place in the store, and have it go on as a new generation.

        From then on the server that shipped to the store before stops to do so. Raises Corrupt where the log cannot be
        opened; Conflict where a server still ships to the store, and has shipped more since `prepare`.
        """
        begin_at_the_end(self._disk, now_us)
        position = self._chosen[-1].end
        generation = self._manifest.generation + 1
        log = LogStore(self._disk.directory)
        await log.open(now_us)
        try:
            self._complaints += [str(damage) for damage in log.damages]
            claimed = self._claim(generation, now_us)
            known_to_us = last_frame_us(self._disk, self._chosen[-1].base)
            await log.begin_generation(generation, known_to_us)
        finally:
            await log.close()
        identity.write(self._directory, identity.Identity(claimed.lineage, generation))
        return Restored(
            claimed.lineage,
            generation,
            position,
            known_to_us,
            len(self._chosen),
            sum(segment.log.size for segment in self._chosen),
            self._complaints,
        )

    def _claim(self, generation: int, now_us: int) -> Manifest:
        """Put the restored log in the place of the one that was shipped. Raises Conflict, ObjectStoreFailed."""
        now = manifest.load(self._store)
        if now is not None and self._until is not None:
            now = _cut(self._store, now, self._until)
        if now is None or (now.end, now.generation) != (self._manifest.end, self._manifest.generation):
            raise Conflict(
                f"the server of this log, or another restore, wrote to {self._store.url} meanwhile: stop it, and repeat"
            )
        # As it is now: what was dropped meanwhile is in the store no more.
        claimed = msgspec.structs.replace(now, generation=generation, shipped_us=now_us)
        manifest.replace(self._store, claimed)
        return claimed

    # --- what is needed ---------------------------------------------------------------------------------------

    def _needed(self, listed: Sequence[ShippedSegment]) -> list[ShippedSegment]:
        """The segments that a server needs to go on: those from where its checkpoint says on."""
        self._checkpoint_at = 0
        first = 0
        saved = self._newest_checkpoint(listed)
        if saved is not None:
            self._checkpoint_at = saved.position
            moved = [position for position, _ in saved.state.moved]
            first = first_needed(saved)
            if first < listed[0].base and moved and min(moved) < listed[0].base:
                waiting = sum(position < listed[0].base for position in moved)
                self._complaints.append(
                    f"{waiting:,} messages that waited for their consumers are from before the first segment that "
                    f"{self._store.url} lists: they cannot be delivered; notify audit names those of transactions"
                )
        elif listed[0].base:
            raise ObjectStoreFailed(
                f"{self._store.url} has no checkpoint that can be read, and its first segment begins at "
                f"{listed[0].base}: the log cannot be built without one"
            )
        remembered_us = max(segment.last_us for segment in listed) - IDS_US
        return list(itertools.dropwhile(lambda s: s.end <= first and s.last_us <= remembered_us, listed))

    def _newest_checkpoint(self, listed: Sequence[ShippedSegment]) -> checkpoint.Checkpoint | None:
        for segment in reversed(listed):
            if segment.checkpoint is None:
                continue
            name = checkpoint.checkpoint_name(segment.end)
            self._drop_checkpoints(name)
            try:
                self._one(segment.checkpoint_name, segment.checkpoint, name)
                return checkpoint.load(self._disk)
            except (ObjectStoreFailed, Corrupt) as error:
                self._complaints.append(f"{error}; an earlier checkpoint serves, with more to replay")
        self._drop_checkpoints("")
        return None

    def _drop_checkpoints(self, kept: str) -> None:
        for name in self._disk.names():
            if name.endswith(".ckpt") and name != kept:
                self._disk.unlink(name)

    def _refuse_missing(self) -> None:
        """Raises ObjectStoreFailed where a segment's bytes are not there: before others are fetched in vain."""
        present = set(self._store.names("segments"))
        unlisted = [segment for segment in self._chosen if segment.log_name not in present]
        # A store may list late what it has: each is asked for by its name, up to the first that is really not there.
        missing = list(itertools.dropwhile(lambda segment: self._store.exists(segment.log_name), unlisted))
        if missing:
            more = f" and {len(missing) - 1:,} more segments" if len(missing) > 1 else ""
            raise self._lost(missing[0], f"{self._store.url}/{missing[0].log_name}{more}: the store does not have it")

    def _lost(self, segment: ShippedSegment, why: str) -> ObjectStoreFailed:
        """The error for a segment that cannot be had, with what can."""
        if segment.base == self._manifest.base:
            return ObjectStoreFailed(f"{why}; nothing before it is listed, so the log cannot be built from this store")
        return ObjectStoreFailed(
            f"{why}; what was stored before {instant(segment.created_us)} can still be had: repeat with "
            f"--until {segment.base}, which gives up what the store has after it"
        )

    # --- files ------------------------------------------------------------------------------------------------

    def _one(self, name: str, expected: StoredObject, local: str) -> None:
        self._fetch(name, expected, self._disk.directory / local)

    def _fetch(self, name: str, expected: StoredObject, target: Path) -> None:
        """Have an object in a file, durably. Raises ObjectStoreFailed where the store has no such content for it."""
        if target.exists() and _digest(target) == (expected.size, expected.sha256):
            return
        temporary = target.with_name(target.name + ".tmp")
        try:
            for _ in range(TRIES):
                with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as sink:
                    size, sha256 = self._store.copy_to(name, sink, expected.size)
                    sink.flush()
                    os.fsync(sink.fileno())
                if (size, sha256) == (expected.size, expected.sha256):
                    temporary.rename(target)
                    return
        except ObjectStoreFailed:
            temporary.unlink()
            raise
        temporary.unlink()
        what = f"has {size:,} bytes instead of {expected.size:,}" if size != expected.size else "has other bytes"
        raise ObjectStoreFailed(f"{self._store.url}/{name} {what} than the manifest says")


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _cut(store: Store, whole: Manifest, until: int) -> Manifest:
    """The manifest without what lies behind a position. Raises InvalidRequest where no segment ends there."""
    pages = tuple(page for page in whole.pages if page.end <= until)
    segments = whole.segments
    if len(pages) < len(whole.pages):
        segments = manifest.load_page(store, whole.pages[len(pages)])
    segments = tuple(segment for segment in segments if segment.end <= until)
    cut = msgspec.structs.replace(whole, pages=pages, segments=segments)
    if not cut.count or cut.end != until:
        raise InvalidRequest(
            f"no segment that {store.url} lists ends at {until}: name a position that a restore printed"
        )
    return cut
