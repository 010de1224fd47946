"""An object of a store as a file, of which only those parts are fetched that are read."""

from __future__ import annotations

import io

from notify.object_store.store import Store

READ_BYTES = 1 << 20
"""The size of a block; smaller reads are served from blocks."""


def opened(store: Store, name: str, size: int) -> io.BufferedReader:
    """An object of `size` bytes. Reading raises ObjectStoreFailed."""
    return io.BufferedReader(_Stored(store, name, size), READ_BYTES)


class _Stored(io.RawIOBase):
    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size = store, name, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._store.read_range(self._name, self._at, min(len(buffer), self._size - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
