"""Restores a data directory from a store: fetches the files, and opens the log once as a new generation.

Records from after the last shipped segment are not in it (docs/backup.md, "A disk is lost").
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
"""How often an object is fetched whose content differs from the manifest's."""


@dataclass(slots=True)
class Restored:
    """The result of a restore."""

    lineage: str
    generation: int
    """The new generation of the log."""
    position: int
    """Where the shipped log ends and the restored one continues."""
    known_to_us: int
    """When the last known record was written, in microseconds since 1970: later records are lost."""
    segments: int = 0
    bytes: int = 0
    complaints: list[str] = field(default_factory=list)
    """Missing or damaged objects that the log can do without, and earlier damage."""


class Restoring:
    """Restores a store into an empty directory. A repeated restore keeps the files that are already there."""

    def __init__(self, store: Store, directory: Path, until: int | None = None) -> None:
        """`until`: restore only the log before this position, at which a segment must end."""
        self._store = store
        self._directory = directory
        self._disk = Disk(directory / LOG)
        self._until = until
        self._complaints: list[str] = []

    def prepare(self) -> int:
        """Read the manifest and choose what to fetch; returns its size in bytes.

        Raises InvalidRequest if nothing was shipped there, ObjectStoreFailed if a needed object is missing.
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
        """Fetch the chosen files that are not here yet; `progress` gets the size of each.

        Raises ObjectStoreFailed if a segment is missing or damaged; the error says what can still be restored.
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
        """Open the log, claim the store for it, and continue it as a new generation.

        After that the server that shipped to the store stops shipping. Raises Corrupt if the log cannot be
        opened, Conflict if a server has shipped more since `prepare`.
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
        """Replace the shipped log with the restored one. Raises Conflict, ObjectStoreFailed."""
        now = manifest.load(self._store)
        if now is not None and self._until is not None:
            now = _cut(self._store, now, self._until)
        if now is None or (now.end, now.generation) != (self._manifest.end, self._manifest.generation):
            raise Conflict(
                f"the server of this log, or another restore, wrote to {self._store.url} meanwhile: stop it, and repeat"
            )
        # The present manifest: segments dropped meanwhile are no longer in the store.
        claimed = msgspec.structs.replace(now, generation=generation, shipped_us=now_us)
        manifest.replace(self._store, claimed)
        return claimed

    # --- what is needed ---------------------------------------------------------------------------------------

    def _needed(self, listed: Sequence[ShippedSegment]) -> list[ShippedSegment]:
        """The segments that a server needs: those from the position on that its checkpoint names."""
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
        """Raises ObjectStoreFailed if a segment is missing, before others are fetched in vain."""
        present = set(self._store.names("segments"))
        unlisted = [segment for segment in self._chosen if segment.log_name not in present]
        # A store may list its objects late, so each is asked for by its name, up to the first that is really missing.
        missing = list(itertools.dropwhile(lambda segment: self._store.exists(segment.log_name), unlisted))
        if missing:
            more = f" and {len(missing) - 1:,} more segments" if len(missing) > 1 else ""
            raise self._lost(missing[0], f"{self._store.url}/{missing[0].log_name}{more}: the store does not have it")

    def _lost(self, segment: ShippedSegment, why: str) -> ObjectStoreFailed:
        """The error for a segment that cannot be restored; it says what can be."""
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
        """Fetch an object into a file, durably. Raises ObjectStoreFailed if the store has no such content."""
        if target.exists() and _digest(target) == (expected.size, expected.sha256):
            return
        temporary = target.with_name(target.name + ".tmp")
        try:
            for _ in range(TRIES):
                with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    size, sha256 = self._store.copy_to(name, file, expected.size)
                    file.flush()
                    os.fsync(file.fileno())
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
    """The manifest up to a position. Raises InvalidRequest if no segment ends there."""
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
