"""`findings.jsonl`: a line for each finding, revision and condition, written once each, in files of a bounded size.

The ledger knows the file's length. Bytes after it, which a kill left, are cut off and written again from the ledger.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from notify.spark.watch.ledger import Ledger
from notify.storage import crash_point

AT_ONCE = 1000
FILE_BYTES = 64 << 20
"""A file of this size is renamed to `findings-{number}.jsonl`, and the next one is begun."""
KEPT_FILES = 8
"""Older renamed files are deleted."""


Line = dict[str, Any]
"""A line as a mapping: `kind`, `window_us` (the window's start), and what belongs to the kind."""


class Lines:
    """Writes the ledger's lines to the file."""

    def __init__(self, ledger: Ledger, file_bytes: int = FILE_BYTES, kept_files: int = KEPT_FILES) -> None:
        self._ledger = ledger
        self._file_bytes = file_bytes
        self._kept_files = kept_files
        self._path = ledger.directory / "findings.jsonl"

    def write(self) -> None:
        """Write all lines of the ledger; they are durable when this returns. Raises OSError."""
        self._finish_renaming()
        self._cut_off()
        while lines := self._ledger.lines(AT_ONCE):
            position = self._ledger.position
            assert position is not None
            data = b"".join(body.encode() + b"\n" for _, body in lines)
            crash_point.reached("watch.before_line_sync")
            end = self._append(data, position.file_offset)
            crash_point.reached("watch.after_line_sync")
            with self._ledger.transaction():
                self._ledger.written(lines[-1][0])
                self._ledger.move(replace(position, file_offset=end))
            crash_point.reached("watch.after_line_note")
            if end >= self._file_bytes:
                with self._ledger.transaction():
                    self._ledger.move(replace(position, file_number=position.file_number + 1, file_offset=0))
                crash_point.reached("watch.before_rename")
                self._finish_renaming()

    def _cut_off(self) -> None:
        """Cut off bytes that a kill left after the ledger's end; the ledger still has their lines."""
        position = self._ledger.position
        if position is not None and self._path.exists() and self._path.stat().st_size > position.file_offset:
            os.truncate(self._path, position.file_offset)

    def _append(self, data: bytes, offset: int) -> int:
        """Append at an offset; returns the file's end."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            start = min(offset, os.fstat(descriptor).st_size)  # the file may have been deleted or emptied
            os.lseek(descriptor, start, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return start + len(data)

    def _finish_renaming(self) -> None:
        """Rename a full file, unless that was done before."""
        position = self._ledger.position
        if position is None or position.file_number == 1:
            return
        full = self._named(position.file_number - 1)
        if not position.file_offset and not full.exists() and self._path.exists():
            self._path.rename(full)
            crash_point.reached("watch.after_rename")
        (self._named(position.file_number - 1 - self._kept_files)).unlink(missing_ok=True)

    def _named(self, number: int) -> Path:
        return self._path.with_name(f"findings-{number:06}.jsonl")
