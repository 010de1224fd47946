"""Drops old segments that nothing needs, first from the manifest and then from the store.

The manifest is replaced before a file is deleted, so a reader of the new one finds every file in it. Files that a crash
leaves in between are below the beginning of the manifest, and are removed at the next look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import msgspec

from notify.errors import Corrupt, ObjectStoreFailed
from notify.object_store.store import Store
from notify.storage.log import checkpoint
from notify.storage.log.checkpoint import Checkpoint
from notify.storage.shipped.manifest import Manifest, Page, ShippedSegment

IDS_US = 7 * 86_400_000_000
"""How long ids of messages are kept at least, even if the messages themselves were dropped earlier."""
MOST_CHECKPOINT_BYTES = 1 << 30
MOST_REMOVED = 1000
"""The most files that are removed before the next segment is shipped."""
_FOLDERS = ("segments", "messages", "pages")
_BEGINNING = re.compile(r"\w+/(\d{20})-(?:(\d{20})-)?\d{6}\.(log|idx|parquet|ckpt|json)")


def first_needed(saved: Checkpoint) -> int:
    """The position from which a log that begins with a checkpoint needs its segments: up to where retention dropped
    them, or the first of the older messages that still wait."""
    return min([saved.state.dropped_to or 0, *[position for position, _ in saved.state.moved]])


def without_old(store: Store, listed: Manifest, local_base: int, before_us: int) -> Manifest:
    """The manifest without its oldest segments that nothing needs; the same manifest if there are none.

    All their entries are from before an instant, their ids have expired, the log itself begins after them, and none of
    their messages waits for a group, a decision or its time.

    `local_base`: where the log begins on its server. Only whole pages are dropped. Raises ObjectStoreFailed.
    """
    parts: list[Page | ShippedSegment] = [*listed.pages, *listed.segments]
    if not parts or parts[0].end > local_base or parts[0].last_us >= before_us:
        return listed  # without reading a checkpoint
    saved = _newest_checkpoint(store, listed)
    bound = min(local_base, first_needed(saved)) if saved is not None else 0
    old_us = min(before_us, max(part.last_us for part in parts) - IDS_US)
    left = list(parts)
    while len(left) > 1 and left[0].end <= bound and left[0].last_us < old_us:
        left.pop(0)
    if len(left) == len(parts):
        return listed
    return msgspec.structs.replace(
        listed,
        pages=tuple(part for part in left if isinstance(part, Page)),
        segments=tuple(part for part in left if isinstance(part, ShippedSegment)),
        dropped_to=left[0].base,
    )


def remove_dropped(store: Store, dropped_to: int) -> int:
    """Remove up to MOST_REMOVED files below the manifest's beginning; returns how many. Raises ObjectStoreFailed."""
    names = list(islice(_dropped(store, dropped_to), MOST_REMOVED))
    for name in names:
        store.delete(name)
    return len(names)


def _dropped(store: Store, dropped_to: int) -> Iterator[str]:
    for folder in _FOLDERS:
        for name in store.names(folder):
            if (match := _BEGINNING.fullmatch(name)) is None:
                continue
            first, end, kind = match.groups()
            # A checkpoint has the position at the end of its segment, and a page those of both ends.
            is_dropped = int(end or first) <= dropped_to if kind in ("ckpt", "json") else int(first) < dropped_to
            if is_dropped:
                yield name


def _newest_checkpoint(store: Store, listed: Manifest) -> Checkpoint | None:
    """The checkpoint that a restore begins with; None if it cannot be read: then nothing is dropped."""
    for segment in reversed(listed.segments):
        known = segment.checkpoint
        if known is not None:
            data = store.read_listed(segment.checkpoint_name, (known.size, known.sha256), MOST_CHECKPOINT_BYTES)
            try:
                return checkpoint.decoded(data)
            except Corrupt as error:
                raise ObjectStoreFailed(f"{segment.checkpoint_name}: {error}") from None
    return None
