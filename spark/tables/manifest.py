"""The manifest of a table: the files with its rows. Other files are not part of the table.

<url>/manifest.json    replaced as a whole
<url>/data/….parquet   written once
<url>/pages/….json     files of a long table that are no longer in the manifest itself
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from notify.errors import InvalidRequest, ObjectStoreFailed
from notify.object_store.store import ObjectMissing, Store
from notify.protocol.wire import UNDECODABLE

NAME = "manifest.json"
FORMAT = 1
MOST_INLINE = 2000
"""Files in the manifest itself; of a table that only grows, the oldest PAGE_FILES then go into a page."""
PAGE_FILES = 1000
MOST_BYTES = 64 << 20


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Parquet file of a table, as it was read back after it was written."""

    name: str
    rows: int
    size: int
    sha256: str
    table: str = ""
    """For several tables under one manifest: which one it belongs to."""
    part: str = ""
    """Which part of the table its rows are, such as a day; a merge rewrites the parts that it touches."""


class Page(msgspec.Struct, frozen=True):
    """An object that lists files."""

    name: str
    files: int
    rows: int
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a table, or of several."""

    format: int = FORMAT
    revision: int = 0
    """Rises by one each time that it is replaced."""
    pages: tuple[Page, ...] = ()
    files: tuple[File, ...] = ()
    offsets: dict[str, Any] = {}
    """How far a table of messages goes, as the source `notify` takes it as its startingOffsets."""
    columns: dict[str, Any] = {}
    """The columns of a table of messages, as Spark's JSON: of all its rows. Empty: an earlier version wrote it."""

    @property
    def rows(self) -> int:
        return sum(page.rows for page in self.pages) + sum(file.rows for file in self.files)


_decode = msgspec.json.Decoder(Manifest).decode
_decode_page = msgspec.json.Decoder(tuple[File, ...]).decode
_encode = msgspec.json.Encoder().encode


def load(store: Store) -> Manifest:
    """The manifest of a table; an empty one if there is none yet. Raises ObjectStoreFailed, InvalidRequest."""
    try:
        manifest = _decode(store.read(NAME, MOST_BYTES))
    except ObjectMissing:
        return Manifest()
    except UNDECODABLE as error:
        raise InvalidRequest(f"{store.url}/{NAME} is not a manifest of a table ({error}): name another URL") from None
    if manifest.format != FORMAT:
        raise InvalidRequest(
            f"{store.url}/{NAME} has format {manifest.format}, this version reads {FORMAT}: use the version of Notify "
            "that wrote it, or a newer one"
        )
    return manifest


def replace(store: Store, before: Manifest, after: Manifest) -> Manifest:
    """Replace a manifest with the next one, which was made from it. Raises ObjectStoreFailed.

    A table has one writer at a time: another one that is noticed is refused.
    """
    after = msgspec.structs.replace(after, revision=before.revision + 1)
    if (now := load(store).revision) != before.revision:
        raise ObjectStoreFailed(
            f"another writer changed {store.url}/{NAME} (revision {now}, expected {before.revision}): a table has one "
            "writer at a time; stop the other one and try again"
        )
    store.replace_checked(NAME, _encode(after), MOST_BYTES)
    return after


def with_page(store: Store, manifest: Manifest) -> Manifest:
    """The same table with its oldest files in a page, if too many are in the manifest. Raises ObjectStoreFailed."""
    if len(manifest.files) <= MOST_INLINE:
        return manifest
    paged, kept = manifest.files[:PAGE_FILES], manifest.files[PAGE_FILES:]
    name = f"pages/{manifest.revision:012d}-{uuid.uuid4().hex[:8]}.json"
    data = _encode(paged)
    size, sha256 = store.put(name, lambda sink: sink.write(data))
    page = Page(name, len(paged), sum(file.rows for file in paged), size, sha256)
    return msgspec.structs.replace(manifest, pages=(*manifest.pages, page), files=kept)


def files_of(store: Store, manifest: Manifest) -> Iterator[File]:
    """All files of a table, the oldest first. Raises ObjectStoreFailed for a damaged page."""
    for page in manifest.pages:
        yield from _decode_page(store.read_listed(page.name, (page.size, page.sha256), MOST_BYTES))
    yield from manifest.files
