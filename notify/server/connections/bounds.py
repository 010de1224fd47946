"""Bounds on a request's head and on the parts of its body. The reader of a body bounds its size."""

from __future__ import annotations

from notify.errors import TooLarge

HEADER_BYTES = 64 << 10
"""The most bytes of a request's head; chunk extensions and trailers may have as many again."""
HEADER_FIELDS = 100
BODY_PARTS = 1 << 16
"""The most parts (chunks or single reads) of a body: each part costs time and memory."""


class Refused(Exception):
    """Raised through the parser to stop it: nothing more is read from this connection."""


def too_large() -> TooLarge:
    """The error for a head beyond its bounds."""
    return TooLarge(
        f"a head has at most {HEADER_FIELDS} fields and {HEADER_BYTES} bytes, and trailers no more than that",
        "head_too_large",
        431,
    )


def in_pieces() -> TooLarge:
    """The error for a body in too many parts."""
    return TooLarge(f"a body has at most {BODY_PARTS} chunks: send larger ones", "request_too_large")
