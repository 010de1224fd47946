"""Hashes of keys and tags, and which of several logs a key belongs to; all machines compute the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from notify.protocol.limits import LIMITS

CACHED_CHARACTERS = LIMITS.key_bytes
"""The hash of a longer key is not cached: it is of a key that is about to be refused."""


def key_hash(key: str | None) -> int:
    """A 64-bit hash of a key; 0 without a key."""
    if key is None:
        return 0
    return _hash_of(key) if len(key) <= CACHED_CHARACTERS else _hash_of.__wrapped__(key)


@lru_cache(maxsize=8192)  # a server asks twice: for the key's shard, and for its entry in an index
def _hash_of(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def shard_of_key(key: str, shards: Sequence[str]) -> str:
    """The shard of a key, chosen by its hash."""
    return shards[key_hash(key) % len(shards)]


def tag_hash(tag: str | None) -> int:
    """The CRC32 of a tag, never 0; 0 for a message without a tag."""
    return (zlib.crc32(tag.encode()) or 1) if tag is not None else 0
