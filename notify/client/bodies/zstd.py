"""Zstandard, which Python has from 3.14 on, and before with the extra zstd."""

from __future__ import annotations

import sys
from typing import Any

from notify.errors import InvalidRequest
from notify.protocol.large_bodies import ENCODING, ZSTD

LEVEL = 3
PIECE_BYTES = 1 << 20
MOST_FRAMES = 1000
"""Each frame costs time, also one without content."""


def library() -> Any:
    """The module. Raises InvalidRequest where it is not installed."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise InvalidRequest(
            f"bodies with {ENCODING}: {ZSTD} need the extra zstd: pip install 'notify-tx[zstd]'"
        ) from None
    return zstd


def compressed(data: bytes) -> bytes:
    """The data compressed. Raises InvalidRequest without the library."""
    smaller: bytes = library().compress(data, LEVEL)
    return smaller


def decompressed(data: bytes, most: int) -> bytes:
    """The data as it was before. Never makes more than `most` bytes and one of it.

    Raises ValueError for other data, for data that is cut short, and for data that had more than `most` bytes.
    InvalidRequest without the library.
    """
    zstd = library()
    pieces: list[bytes] = []
    size = frames = 0
    while data:  # a body may be several frames, one after the other
        frames += 1
        if frames > MOST_FRAMES:
            raise ValueError(f"it has more than {MOST_FRAMES:,} frames")
        frame = zstd.ZstdDecompressor()
        while not frame.eof:
            try:
                piece = frame.decompress(data, min(PIECE_BYTES, most + 1 - size))
            except zstd.ZstdError as error:
                raise ValueError(f"it is not in Zstandard's format: {error}") from None
            size += len(piece)
            if size > most:
                raise ValueError(f"it has more than {most:,} bytes once it is decompressed")
            pieces.append(piece)
            data = b""
            if not frame.eof and frame.needs_input:
                raise ValueError("it is cut short")
        data = frame.unused_data
    return b"".join(pieces)
