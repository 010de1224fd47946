"""The digest of a message's body, with which an audit checks that the queue has the body that the producer sent."""

from __future__ import annotations

from hashlib import blake2b

_BYTES = 8


def body_digest(body: bytes) -> int:
    """The 64-bit BLAKE2b digest of an encoded body, as a signed number for a BIGINT column."""
    return int.from_bytes(blake2b(body, digest_size=_BYTES).digest(), "big", signed=True)
