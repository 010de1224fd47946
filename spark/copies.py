"""Copies of a log's segments as Parquet, for this audit and the next: in a directory, or in a store (copies_stored.py).

A copy is a directory with four tables and `facts.json`, which comes last: without it there is no copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from notify.spark.columns import spark_schema
from notify.spark.facts import Scanned
from notify.spark.log_files import SegmentFile
from notify.storage import crash_point

_VERSION = 11
_LEFT_SECONDS = 3600.0
"""A temporary file of this age was left behind by an audit that was killed."""
decode_facts = msgspec.json.Decoder(Scanned).decode
# Ids and positions rarely repeat, so dictionaries would only cost time.
WRITING: Mapping[str, Any] = {"compression": "lz4", "use_dictionary": False, "row_group_size": 1 << 17}


def copy_name(segment: SegmentFile) -> str:
    """The name of a segment's copy, which no copy of other bytes has."""
    return f"{segment.base:020d}-{segment.sealed_end}-{segment.size}-{segment.mark}-v{_VERSION}"


def fitting(segments: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
    """The first segments, as many as have so many bytes together."""
    chosen = []
    for segment in segments:
        most_bytes -= segment.size
        if most_bytes < 0:
            break
        chosen.append(segment)
    return chosen


class Copies(Protocol):
    """The copies of one log's segments. Workers get it pickled, to write them."""

    def has(self, segment: SegmentFile) -> bool:
        """Whether there is a copy."""

    def facts_of(self, segment: SegmentFile) -> Scanned:
        """The facts of a segment that has a copy."""

    def write(self, segment: SegmentFile, tables: Mapping[str, pa.Table], facts: Scanned) -> None:
        """Make a copy. Raises OSError."""

    def note(self, made: Mapping[str, Scanned]) -> None:
        """Tasks have made these copies, by their names."""

    def keep(self, wanted: set[str]) -> None:
        """Forget all copies but these, by their names."""

    def release(self) -> None:
        """Nobody asks for facts any more: hold none."""

    def longest_unread(self, copied: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
        """Segments with a copy, those first that were compared with it the longest ago, up to so many bytes."""

    def compared(self, segment: SegmentFile) -> None:
        """The segment's bytes are those of its copy, as was seen just now."""

    def forget(self, segment: SegmentFile) -> None:
        """Remove a copy, if there is one."""

    def rows(
        self, spark: SparkSession, table: str, schema: pa.Schema, segments: Sequence[tuple[SegmentFile, int]]
    ) -> DataFrame:
        """A table of some copies, by Spark's workers. `segments`: with the number of rows of each."""

    def read(self, table: str, segment: SegmentFile, **options: Any) -> pa.Table:
        """A table of a copy, in this process; `options`: of pyarrow.parquet.read_table."""


@dataclass(frozen=True)
class LocalCopies:
    """Copies in a directory, which every worker must reach by the same path."""

    directory: Path

    def _of(self, segment: SegmentFile) -> Path:
        return self.directory / copy_name(segment)

    def has(self, segment: SegmentFile) -> bool:
        return (self._of(segment) / "facts.json").exists()

    def facts_of(self, segment: SegmentFile) -> Scanned:
        return decode_facts((self._of(segment) / "facts.json").read_bytes())

    def write(self, segment: SegmentFile, tables: Mapping[str, pa.Table], facts: Scanned) -> None:
        to = self._of(segment)
        to.mkdir(parents=True, exist_ok=True)
        for left in to.glob("*.tmp"):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink(missing_ok=True)
        for name, table in tables.items():
            temporary = to / f"{name}.{os.getpid()}.tmp"
            pq.write_table(table, temporary, **WRITING)
            temporary.rename(to / f"{name}.parquet")
        crash_point.reached("copy.before_facts")
        temporary = to / f"facts.{os.getpid()}.tmp"
        temporary.write_bytes(msgspec.json.encode(facts))
        temporary.rename(to / "facts.json")

    def note(self, made: Mapping[str, Scanned]) -> None:
        """Their files say it."""

    def keep(self, wanted: set[str]) -> None:
        for name in [entry.name for entry in self.directory.iterdir()]:
            if name not in wanted:
                self._forget(name)

    def longest_unread(self, copied: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
        return fitting(sorted(copied, key=lambda s: (self._of(s) / "facts.json").stat().st_mtime_ns), most_bytes)

    def compared(self, segment: SegmentFile) -> None:
        os.utime(self._of(segment) / "facts.json")

    def forget(self, segment: SegmentFile) -> None:
        self._forget(copy_name(segment))

    def _forget(self, name: str) -> None:
        """Its facts go first: the rest of a copy counts as none after a kill."""
        copy = self.directory / name
        (copy / "facts.json").unlink(missing_ok=True)
        crash_point.reached("copy.forgetting")
        for file in copy.iterdir():
            file.unlink()
        copy.rmdir()

    def release(self) -> None:
        """It holds none."""

    def rows(
        self, spark: SparkSession, table: str, schema: pa.Schema, segments: Sequence[tuple[SegmentFile, int]]
    ) -> DataFrame:
        paths = [str(self._of(segment) / f"{table}.parquet") for segment, _ in segments]
        return spark.read.schema(spark_schema(schema)).parquet(*paths)

    def read(self, table: str, segment: SegmentFile, **options: Any) -> pa.Table:
        return pq.read_table(self._of(segment) / f"{table}.parquet", **options)
