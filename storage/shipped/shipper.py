"""Ships the sealed segments of a log's directory to a store, one by one, and lists them in its manifest.

A segment is listed once all its objects were written and read back. Objects that a crash left in the store without
being listed are written again. Before each change the manifest in the store is compared with the one that this shipper
wrote last: if another server, or a restore that continues the log, has changed it, the shipping ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import msgspec

from notify.errors import Conflict, Corrupt, ObjectStoreFailed
from notify.object_store.object_file import CHUNK
from notify.object_store.store import Store
from notify.runtime.clock import Clock, wall_clock
from notify.storage import crash_point
from notify.storage.log.index import index_name
from notify.storage.log.segments import segment_name
from notify.storage.shipped import identity, layout, records, retention
from notify.storage.shipped import manifest as manifests
from notify.storage.shipped.identity import Identity
from notify.storage.shipped.local import LocalLog, SealedSegment
from notify.storage.shipped.manifest import Manifest, ShippedRecords, ShippedSegment, StoredObject
from notify.storage.shipped.payloads import Payloads
from notify.storage.shipped.table import write_messages

FOREIGN = "foreign_store"
"""Code of the error for a store with another log, or with another copy of this log that continued separately."""
SUPERSEDED = "superseded"
"""Code of the error for a log that was restored elsewhere, and replaced by the restored one."""


class Shipper:
    """Ships one data directory's log to one store. One thread at a time."""

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        *,
        clock: Clock = wall_clock,
        most_inline: int = manifests.MOST_INLINE,
        page_segments: int = manifests.PAGE_SEGMENTS,
    ) -> None:
        """`most_inline`, `page_segments`: see manifest.py. Nothing is read before `begin`."""
        self.store = store
        self._data_dir = data_dir
        self._log = LocalLog(data_dir / "log")
        self._clock = clock
        self._most_inline = most_inline
        self._page_segments = page_segments
        self._manifest: Manifest | None = None
        self._records: records.Signature | None = None
        """The signature of the listed records."""

    @property
    def manifest(self) -> Manifest:
        """The manifest that was written last. Raises LookupError before `begin`."""
        if self._manifest is None:
            raise LookupError("the shipper has not begun")
        return self._manifest

    # --- whether this log may go there ------------------------------------------------------------------------

    def begin(self) -> Manifest:
        """Claim the store, if it has this log or none; returns its manifest.

        Raises Conflict (codes `foreign_store` and `superseded`) if the store has another log, and
        ObjectStoreFailed if it does not answer or cannot be written.
        """
        bases = self._log.bases()
        if not bases:
            raise Corrupt(f"{self._log.directory} has no log (no *.log files): name the data directory of a server")
        own = identity.read(self._data_dir)
        listed = manifests.load(self.store)
        if listed is None:
            if own is None:
                own = identity.new()
                identity.write(self._data_dir, own)
            elif self.store.url in own.stores:
                raise ObjectStoreFailed(
                    f"{self.store.url} has no {layout.MANIFEST} any more: is it mounted, and the same as before? To "
                    f"ship everything again, remove the URL from {self._data_dir / identity.NAME}"
                )
            listed = Manifest(lineage=own.lineage, generation=own.generation, dropped_to=bases[0])
        else:
            self._refuse_foreign(own, listed)
            assert own is not None
            self._refuse_divergence(bases, listed)
        # Always written, so that a store that cannot be written fails now, not when the first segment is full.
        self._manifest = msgspec.structs.replace(listed, generation=own.generation)
        manifests.replace(self.store, self._manifest)
        if self.store.url not in own.stores:
            identity.write(self._data_dir, msgspec.structs.replace(own, stores=(*own.stores, self.store.url)))
        return self._manifest

    def _refuse_foreign(self, own: Identity | None, listed: Manifest) -> None:
        if own is None or own.lineage != listed.lineage:
            raise Conflict(
                f"{self.store.url} holds another log (lineage {listed.lineage}): restore from it (notify restore), or "
                "name another URL",
                FOREIGN,
            )
        if listed.generation > own.generation:
            raise Conflict(
                f"{self.store.url} was restored elsewhere: generation {listed.generation} of this log has taken the "
                f"place of generation {own.generation}. Stop this server, or give the log another URL",
                SUPERSEDED,
            )

    def _refuse_divergence(self, bases: list[int], listed: Manifest) -> None:
        """Raises Conflict unless the log continues where the manifest ends."""
        if bases[0] > listed.end:
            raise Conflict(
                f"{self.store.url} lists this log up to position {listed.end}, and the log begins at {bases[0]}: "
                "retention dropped the segments in between while shipping was off. Name another URL",
                FOREIGN,
            )
        if listed.count and listed.end not in bases:
            raise Conflict(
                f"{self.store.url} lists this log up to position {listed.end}, where no segment of {self._data_dir} "
                "begins: this is an older or another copy of the log. Restore from the store, or name another URL",
                FOREIGN,
            )
        last = listed.segments[-1] if listed.segments else None
        if last is not None and last.base in bases:
            sealed = self._log.sealed_at(last.base)
            if sealed is not None and (sealed.end, sealed.created_us) != (last.end, last.created_us):
                raise Conflict(
                    f"{self.store.url} lists another segment at position {last.base} than {self._data_dir} has: they "
                    "are two copies of one log that continued separately. Name another URL",
                    FOREIGN,
                )

    # --- shipping ---------------------------------------------------------------------------------------------

    def waiting(self) -> list[tuple[int, int]]:
        """(base, bytes) of the finished segments that are not listed yet, in log order."""
        return self._log.waiting(self.manifest.end)

    def ship_next(self) -> ShippedSegment | None:
        """Ship the next sealed segment and list it; None if none can be shipped now.

        Raises ObjectStoreFailed if the store fails (call again), Conflict if another process writes to it,
        and Corrupt or OSError if the log's files cannot be read.
        """
        manifest = self.manifest
        sealed = self._log.sealed_at(manifest.end)
        if sealed is None:
            return None
        topics = self._log.topic_names(sealed.end)
        if topics is None:
            return None  # its checkpoint is still being written
        # Check before writing too, because two logs that begin alike have the same object names.
        self._refuse_others()
        crash_point.reached("ship.before_log")
        shipped = self._put(sealed, manifest, topics)
        listed = msgspec.structs.replace(manifest, segments=(*manifest.segments, shipped), shipped_us=self._clock())
        listed, signature = self._with_records(listed)
        paged = manifests.with_page(self.store, listed, self._most_inline, self._page_segments)
        if paged is not listed:
            crash_point.reached("ship.after_page")
        crash_point.reached("ship.before_manifest")
        self._replace(paged)
        self._records = signature
        crash_point.reached("ship.after_manifest")
        return shipped

    def ship_records(self) -> bool:
        """Ship the administrators' records if they have changed; returns whether so. Raises what `ship_next` raises."""
        listed, signature = self._with_records(self.manifest)
        if listed is self.manifest:
            return False
        self._replace(listed)
        self._records = signature
        return True

    def drop_old(self, keep_us: int) -> int:
        """Drop unneeded segments older than `keep_us` from the manifest (see retention.py); returns how many.

        `remove_dropped` removes their files afterwards. Raises what `ship_next` raises.
        """
        listed, bases = self.manifest, self._log.bases()
        kept = retention.without_old(self.store, listed, bases[0], self._clock() - keep_us) if bases else listed
        if kept is listed:
            return 0
        crash_point.reached("keep.before_manifest")
        self._replace(kept)
        return listed.count - kept.count

    def remove_dropped(self) -> int:
        """Remove some files of segments that are no longer listed, or that a crash left; returns how many.

        Raises ObjectStoreFailed, and Conflict if another process writes to the store."""
        self._refuse_others()
        crash_point.reached("keep.before_files")
        return retention.remove_dropped(self.store, self.manifest.dropped_to)

    def _with_records(self, listed: Manifest) -> tuple[Manifest, records.Signature | None]:
        """The manifest with the present administrators' records, and their signature."""
        signature = records.signature(self._data_dir)
        if signature is None or signature == self._records:
            return listed, self._records
        now_us = self._clock()
        with records.copied(self._data_dir) as copy:
            stored = self._put_file(layout.records_name(now_us, listed.generation), copy)
        shipped = ShippedRecords(at_us=now_us, generation=listed.generation, object=stored)
        return msgspec.structs.replace(listed, records=shipped), signature

    def _replace(self, new: Manifest) -> None:
        self._refuse_others()
        before = self.manifest.records
        manifests.replace(self.store, new)
        self._manifest = new
        if before is not None and new.records != before:
            self.store.delete(before.name)  # only this object is deleted when a newer one replaces it

    def _refuse_others(self) -> None:
        """Raises Conflict if the store has another manifest than the one that was written last, and
        ObjectStoreFailed if it has one that this shipper wrote earlier."""
        there = manifests.load(self.store)
        if there is None:
            raise ObjectStoreFailed(f"{self.store.url} has lost its {layout.MANIFEST}")
        if there != self.manifest:
            self._refuse_foreign(Identity(self.manifest.lineage, self.manifest.generation), there)
            if manifests.is_earlier(there, self.manifest):
                raise ObjectStoreFailed(
                    f"{self.store.url} returns an earlier {layout.MANIFEST} than the one that was stored last: the "
                    "store lags, or loses what it acknowledged"
                )
            raise Conflict(
                f"{self.store.url}: another process ships this log, too. Stop one of them, or give it another URL",
                FOREIGN,
            )

    def _put(self, sealed: SealedSegment, manifest: Manifest, topics: dict[int, str]) -> ShippedSegment:
        """Write the objects of a segment."""
        base, generation = sealed.base, manifest.generation
        directory = self._log.directory
        log = self._put_file(layout.log_name(base, generation), directory / segment_name(base), sealed.end - base)
        crash_point.reached("ship.after_log")
        idx = self._put_file(layout.index_name(base, generation), directory / index_name(base))
        saved = self._log.checkpoint_at(sealed.end)
        checkpoint = None
        if saved is not None:
            name = layout.checkpoint_name(sealed.end, generation)
            checkpoint = StoredObject(*self.store.put(name, lambda file: file.write(saved)))
        unreadable: list[int] = []
        with self._log.index(base) as part, Payloads(self._log, self.store, manifest, part.entries) as payloads:

            def fill(file: Any) -> None:
                unreadable.append(write_messages(part.entries, topics, payloads.read, file))

            parquet = self.store.put(layout.parquet_name(base, generation), fill)
        return ShippedSegment(
            base=base,
            end=sealed.end,
            generation=generation,
            created_us=sealed.created_us,
            first_us=sealed.first_us,
            last_us=sealed.last_us,
            messages=sealed.messages,
            unreadable=unreadable[-1],
            log=log,
            idx=idx,
            parquet=StoredObject(*parquet),
            checkpoint=checkpoint,
        )

    def _put_file(self, name: str, path: Path, size: int | None = None) -> StoredObject:
        """Write an object from a file's first `size` bytes, or from all. Raises Corrupt if the file is shorter."""
        with path.open("rb") as file:
            written = self.store.put(name, lambda copy: _copy(file, size, copy))
        if size is not None and written[0] != size:
            raise Corrupt(f"{path} has {written[0]:,} bytes, its index says {size:,}: see `notify audit run --log …`")
        return StoredObject(*written)


def _copy(file: IO[bytes], size: int | None, copy: Any) -> None:
    file.seek(0)
    left = size if size is not None else 1 << 62
    while left and (chunk := file.read(min(CHUNK, left))):
        copy.write(chunk)
        left -= len(chunk)
