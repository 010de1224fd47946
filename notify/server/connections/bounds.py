"""Bounds on one request: its head, and the parts of its body. The body's size is bounded where it is read."""

from __future__ import annotations

from notify.errors import TooLarge

HEADER_BYTES = 64 << 10
"""The most that a request's head may have, and as much again for chunk extensions and trailers."""
HEADER_FIELDS = 100
BODY_PARTS = 1 << 16
"""The most parts (chunks, or what single reads bring) that a body may come in: each costs time and memory by itself."""


class Refused(Exception):
    """Raised through the parser, so that it stops: nothing more of this connection is read."""


def too_large() -> TooLarge:
    """The refusal of a head beyond its bounds."""
    return TooLarge(
        f"a head has at most {HEADER_FIELDS} fields and {HEADER_BYTES} bytes, and trailers no more than that",
        "head_too_large",
        431,
    )


def in_pieces() -> TooLarge:
    """The refusal of a body in too many parts."""
    return TooLarge(f"a body has at most {BODY_PARTS} chunks: send larger ones", "request_too_large")
