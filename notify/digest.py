"""The digest of a message's body, by which an audit knows whether the queue has what the producer sent."""

from __future__ import annotations

from hashlib import blake2b

_BYTES = 8


def body_digest(body: bytes) -> int:
    """BLAKE2b of an encoded body, 64 bits of it, as a signed number: what a BIGINT column holds."""
    return int.from_bytes(blake2b(body, digest_size=_BYTES).digest(), "big", signed=True)
