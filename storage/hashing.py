"""The hash that an index holds in place of a tag, the same on every machine. notify/protocol/keys.py hashes keys."""

from __future__ import annotations

import zlib


def tag_hash(tag: str | None) -> int:
    """The CRC32 of a tag, never 0; 0 for a message without a tag."""
    return (zlib.crc32(tag.encode()) or 1) if tag is not None else 0
