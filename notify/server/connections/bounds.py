"""Bounds on a request's head and on the parts of its body. The reader of a body bounds its size."""

from __future__ import annotations

from notify.errors import TooLarge

HEADER_BYTES = 64 << 10
"""The most bytes of a request's head; chunk extensions and trailers may have as many again."""
URL_BYTES = 16 << 10
"""The most bytes of a request's path and query, which are decoded before the sender is known."""
HEADER_FIELDS = 100
BODY_PARTS = 1 << 16
"""The most parts (chunks or single reads) of a body: each part costs time and memory."""
STRANGERS_PARTS = 1 << 10
"""The same for a sender that is not known (yet)."""


class Refused(Exception):
    """Raised through the parser to stop it: nothing more is read from this connection."""


def too_large() -> TooLarge:
    """The error for a head beyond its bounds."""
    return TooLarge(
        f"a head has at most {HEADER_FIELDS} fields and {HEADER_BYTES} bytes, and trailers at most as many; a path "
        f"with its query has at most {URL_BYTES} bytes",
        "head_too_large",
        431,
    )


def in_pieces(most: int) -> TooLarge:
    """The error for a body in more than `most` parts."""
    return TooLarge(f"a body has at most {most} chunks: send larger ones", "request_too_large")
