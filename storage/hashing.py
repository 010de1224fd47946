"""Hashes of tags and keys that an index holds instead of the text; the same on every machine."""

from __future__ import annotations

import zlib
from hashlib import blake2b


def tag_hash(tag: str | None) -> int:
    """32 bits of a tag, 0 for none."""
    return (zlib.crc32(tag.encode()) or 1) if tag is not None else 0


def key_hash(key: str | None) -> int:
    """64 bits of a key, 0 for none."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1
