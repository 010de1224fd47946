"""The place of a key where several logs divide the keys: the same for clients and servers, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def key_hash(key: str | None) -> int:
    """64 bits of a key, 0 for none."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def shard_of_key(key: str, shards: Sequence[str]) -> str:
    """The shard of a key: the one of these that its hash picks."""
    return shards[key_hash(key) % len(shards)]
