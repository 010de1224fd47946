"""The place of a key where several logs divide the keys: the same for clients and servers, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=8192)  # a server asks twice: for the key's place, and for its entry in an index
def key_hash(key: str | None) -> int:
    """64 bits of a key, 0 for none."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def shard_of_key(key: str, shards: Sequence[str]) -> str:
    """The shard of a key: the one of these that its hash picks."""
    return shards[key_hash(key) % len(shards)]
