"""The manifest of a store: which segments of which log were shipped. Everything that it lists is complete.

The newest segments are in the manifest itself. Older ones are in pages, which never change, so that replacing the
manifest costs the same however long the log is. Segments are in log order and follow each other without gaps.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from notify.errors import ObjectStoreFailed
from notify.object_store.store import ObjectMissing, Store
from notify.protocol.wire import UNDECODABLE
from notify.storage.shipped import layout

FORMAT = 1
MOST_INLINE = 1000
"""The most segments in the manifest itself; beyond it the oldest PAGE_SEGMENTS go into a page."""
PAGE_SEGMENTS = 500
MOST_BYTES = 64 << 20
"""The largest manifest or page that a reader takes into memory."""


class StoredObject(msgspec.Struct, frozen=True):
    """An object's content, as read back after writing."""

    size: int
    """Bytes."""
    sha256: str
    """In hexadecimal digits."""


class ShippedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of the log, with all its shipped objects."""

    base: int
    """Position of its first byte; `end`: the position after its last."""
    end: int
    generation: int
    """The generation of the log that shipped it, which is a part of its objects' names."""
    created_us: int
    first_us: int
    """Times of the first and the last entry of its index, in microseconds since 1970; 0 for a segment without one."""
    last_us: int
    messages: int
    """Messages that it put into queues: the rows of its table."""
    unreadable: int = 0
    """How many of these have no body in the table because their payload could not be read."""
    log: StoredObject
    idx: StoredObject
    parquet: StoredObject
    checkpoint: StoredObject | None = None
    """The state at `end`; None if it was dropped before the segment was shipped."""

    @property
    def log_name(self) -> str:
        return layout.log_name(self.base, self.generation)

    @property
    def index_name(self) -> str:
        return layout.index_name(self.base, self.generation)

    @property
    def checkpoint_name(self) -> str:
        """The name of the object, if there is one."""
        return layout.checkpoint_name(self.end, self.generation)

    @property
    def parquet_name(self) -> str:
        return layout.parquet_name(self.base, self.generation)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """An object that lists segments: those of [base, end)."""

    base: int
    end: int
    generation: int
    first_us: int
    """The lowest time of an entry in its segments; `last_us`: the highest. Both are 0 if there is no entry."""
    last_us: int
    segments: int
    messages: int
    bytes: int
    """The total size of its segments' logs."""
    object: StoredObject

    @property
    def name(self) -> str:
        return layout.page_name(self.base, self.end, self.generation)


class ShippedRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The administrators' records (settings, limits, tokens, jobs) of the log: an SQLite database."""

    at_us: int
    """When the copy was taken, in microseconds since 1970: after the segments listed by then were sealed."""
    generation: int
    object: StoredObject

    @property
    def name(self) -> str:
        return layout.records_name(self.at_us, self.generation)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of everything in a store."""

    format: int = FORMAT
    lineage: str
    """A UUID, the log's lineage. A restored log has that of the log that it continues."""
    generation: int = 1
    """Rises by one at each restore. A server of a lower generation stops shipping."""
    pages: tuple[Page, ...] = ()
    segments: tuple[ShippedSegment, ...] = ()
    """The segments after the last page."""
    records: ShippedRecords | None = None
    """None if there were none, or if they were not shipped yet."""
    dropped_to: int = 0
    """Position below which no segments are listed because retention dropped them."""
    shipped_us: int = 0
    """When a segment was listed last, 0 for never, in microseconds since 1970."""

    @property
    def base(self) -> int:
        """Position of the first listed byte."""
        parts: Sequence[Page | ShippedSegment] = self.pages or self.segments
        return parts[0].base if parts else self.dropped_to

    @property
    def end(self) -> int:
        """Position after the last listed byte."""
        parts: Sequence[Page | ShippedSegment] = self.segments or self.pages
        return parts[-1].end if parts else self.dropped_to

    @property
    def count(self) -> int:
        """The number of listed segments."""
        return sum(page.segments for page in self.pages) + len(self.segments)


_decode_manifest = msgspec.json.Decoder(Manifest).decode
_decode_page = msgspec.json.Decoder(tuple[ShippedSegment, ...]).decode
_encode = msgspec.json.Encoder().encode


def decoded(data: bytes) -> Manifest:
    """Decode a manifest. Raises ObjectStoreFailed with the reason if it is invalid."""
    try:
        manifest = _decode_manifest(data)
    except UNDECODABLE as error:
        raise ObjectStoreFailed(f"{layout.MANIFEST} is not a manifest that this version can read ({error})") from None
    if manifest.format != FORMAT:
        raise ObjectStoreFailed(
            f"{layout.MANIFEST} has format {manifest.format}, this version reads {FORMAT}: use the version of Notify "
            "that wrote it, or a newer one"
        )
    try:
        uuid.UUID(manifest.lineage)
    except ValueError:
        raise ObjectStoreFailed(f"{layout.MANIFEST}: its lineage is not a UUID") from None
    parts: list[Page | ShippedSegment] = [*manifest.pages, *manifest.segments]
    _refuse_gaps(layout.MANIFEST, manifest.dropped_to, parts)
    return manifest


def _refuse_gaps(name: str, start: int, parts: Sequence[Page | ShippedSegment]) -> None:
    if parts and (parts[0].base < start or any(part.base >= part.end for part in parts)):
        raise ObjectStoreFailed(f"{name} is damaged: it lists dropped segments, or one without bytes")
    for one, following in pairwise(parts):
        if one.end != following.base:
            raise ObjectStoreFailed(f"{name} is damaged: it lists nothing between {one.end} and {following.base}")


def is_earlier(one: Manifest, other: Manifest) -> bool:
    """Whether one shipper wrote the first and then the second: the second has everything that the first lists."""

    def progress(manifest: Manifest) -> tuple[int, int, int, int]:
        records_us = manifest.records.at_us if manifest.records is not None else 0
        return manifest.end, manifest.shipped_us, manifest.dropped_to, records_us

    known = {segment.base: segment for segment in other.segments}
    return (
        (one.lineage, one.generation) == (other.lineage, other.generation)
        and all(before <= after for before, after in zip(progress(one), progress(other), strict=True))
        and all(known.get(segment.base, segment) == segment for segment in one.segments)
    )


def load(store: Store) -> Manifest | None:
    """The manifest of a store; None if there is none. Raises ObjectStoreFailed."""
    try:
        return decoded(store.read(layout.MANIFEST, MOST_BYTES))
    except ObjectMissing:
        return None


def replace(store: Store, manifest: Manifest) -> None:
    """Replace the manifest of a store, and read it back. Raises ObjectStoreFailed."""
    store.replace_checked(layout.MANIFEST, _encode(manifest), MOST_BYTES)


def load_page(store: Store, page: Page) -> tuple[ShippedSegment, ...]:
    """The segments of a page. Raises ObjectStoreFailed."""
    data = store.read_listed(page.name, (page.object.size, page.object.sha256), MOST_BYTES)
    try:
        segments = _decode_page(data)
    except UNDECODABLE as error:
        raise ObjectStoreFailed(f"{page.name} is not a page that this version can read ({error})") from None
    _refuse_gaps(page.name, page.base, segments)
    return segments


def segments_from(store: Store, manifest: Manifest, position: int = 0, first_us: int = 0) -> Iterator[ShippedSegment]:
    """The listed segments in log order, except those that end at or before a position or, with `first_us`, have no
    entry from that time on. A page is read when it is reached, if it has such a segment. Raises ObjectStoreFailed."""

    def wanted(part: Page | ShippedSegment) -> bool:
        return part.end > position and (not first_us or (part.last_us >= first_us and part.first_us > 0))

    for page in manifest.pages:
        if wanted(page):
            yield from filter(wanted, load_page(store, page))
    yield from filter(wanted, manifest.segments)


def with_page(
    store: Store, manifest: Manifest, most_inline: int = MOST_INLINE, page_segments: int = PAGE_SEGMENTS
) -> Manifest:
    """The same list with the oldest segments moved to a page, which is written, if it has more than `most_inline`.

    Raises ObjectStoreFailed.
    """
    if len(manifest.segments) <= most_inline:
        return manifest
    paged, kept = manifest.segments[:page_segments], manifest.segments[page_segments:]
    name = layout.page_name(paged[0].base, paged[-1].end, manifest.generation)
    data = _encode(paged)
    size, sha256 = store.put(name, lambda file: file.write(data))
    timed = [segment for segment in paged if segment.first_us]
    page = Page(
        base=paged[0].base,
        end=paged[-1].end,
        generation=manifest.generation,
        first_us=min((segment.first_us for segment in timed), default=0),
        last_us=max((segment.last_us for segment in timed), default=0),
        segments=len(paged),
        messages=sum(segment.messages for segment in paged),
        bytes=sum(segment.end - segment.base for segment in paged),
        object=StoredObject(size, sha256),
    )
    return msgspec.structs.replace(manifest, pages=(*manifest.pages, page), segments=kept)
