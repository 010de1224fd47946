"""The hash of tags that an index holds instead of the text; the same on every machine. Keys: see notify/keys.py."""

from __future__ import annotations

import zlib


def tag_hash(tag: str | None) -> int:
    """32 bits of a tag, 0 for none."""
    return (zlib.crc32(tag.encode()) or 1) if tag is not None else 0
