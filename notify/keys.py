"""Which of several logs a key belongs to; clients and servers on all machines compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=8192)  # a server asks twice: for the key's shard, and for its entry in an index
def key_hash(key: str | None) -> int:
    """A 64-bit hash of a key; 0 without a key."""
    if key is None:
        return 0
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def shard_of_key(key: str, shards: Sequence[str]) -> str:
    """The shard of a key, chosen by its hash."""
    return shards[key_hash(key) % len(shards)]
