"""Finds a log, and the copies of its segments, by the value of a flag: a directory, or the URL of a store."""

from __future__ import annotations

from pathlib import Path

from notify.spark.inputs.copies import Copies, LocalCopies
from notify.spark.inputs.log_files import LocalFiles, LogFiles


def is_store(place: Path | str) -> bool:
    """Whether a place is the URL of a store: `s3://bucket/prefix`, `hdfs://…`, `file:///…`."""
    return isinstance(place, str) and "://" in place


def files_of(place: Path | str) -> LogFiles:
    """The files of a log. Raises InvalidRequest if there is no log, and Unavailable if the store does not answer."""
    if is_store(place):
        from notify.spark.inputs.log_shipped import ShippedFiles

        return ShippedFiles.of(str(place))
    return LocalFiles.of(place)


def copies_in(scratch: Path | str, name: str) -> Copies:
    """The copies of a log's segments in a scratch place. `name`: the log's name, unique in that place."""
    if is_store(scratch):
        from notify.spark.inputs.copies_stored import StoredCopies

        return StoredCopies.of(f"{str(scratch).rstrip('/')}/{name}")
    directory = Path(scratch) / name
    directory.mkdir(parents=True, exist_ok=True)
    return LocalCopies(directory)
