"""Copies of a log's segments as Parquet, for this audit and later ones: in a directory or a store (copies_stored.py).

A copy is a directory with four tables and `facts.json`. That file is written last: without it the copy does not count.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from notify.spark.inputs.columns import spark_schema
from notify.spark.inputs.facts import Scanned
from notify.spark.inputs.log_files import SegmentFile
from notify.storage import crash_point

_VERSION = 13
_LEFT_SECONDS = 3600.0
_PATTERN_SIGNS = re.compile(r"[\\*?\[\]{}]")
"""A temporary file that is older was left behind by an audit that was killed."""
decode_facts = msgspec.json.Decoder(Scanned).decode
# Ids and positions rarely repeat, so that dictionaries only cost time.
WRITING: Mapping[str, Any] = {"compression": "lz4", "use_dictionary": False, "row_group_size": 1 << 17}


def copy_name(segment: SegmentFile) -> str:
    """The name of a segment's copy; copies of other bytes have other names."""
    return f"{segment.base:020d}-{segment.sealed_end}-{segment.size}-{segment.mark}-v{_VERSION}"


def fitting(segments: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
    """The first segments that have at most `most_bytes` together."""
    first_segments = []
    for segment in segments:
        most_bytes -= segment.size
        if most_bytes < 0:
            break
        first_segments.append(segment)
    return first_segments


class Copies(Protocol):
    """The copies of one log's segments. Spark's workers get this object pickled and write copies with it."""

    def has(self, segment: SegmentFile) -> bool:
        """Whether the segment has a copy."""

    def facts_of(self, segment: SegmentFile) -> Scanned:
        """The facts of a segment that has a copy."""

    def write(self, segment: SegmentFile, tables: Mapping[str, pa.Table], facts: Scanned) -> None:
        """Make a copy. Raises OSError."""

    def note(self, made: Mapping[str, Scanned]) -> None:
        """Record the facts of copies that tasks have written, by the names of the copies."""

    def keep(self, wanted: set[str]) -> None:
        """Remove all copies except those with these names."""

    def release(self) -> None:
        """Free the facts: nobody will ask for them again."""

    def longest_unread(self, copied: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
        """The segments that were compared with their copies the longest ago, up to `most_bytes` together."""

    def compared(self, segment: SegmentFile) -> None:
        """Record that the segment was just compared with its copy and is equal."""

    def forget(self, segment: SegmentFile) -> None:
        """Remove the copy of a segment, if it has one."""

    def rows(
        self, spark: SparkSession, table: str, schema: pa.Schema, segments: Sequence[tuple[SegmentFile, int]]
    ) -> DataFrame:
        """The table `table` of these copies; Spark's workers read it. `segments`: each with its number of rows."""

    def read(self, table: str, segment: SegmentFile, **options: Any) -> pa.Table:
        """The table `table` of a copy, read in this process; `options`: of pyarrow.parquet.read_table."""


@dataclass(frozen=True)
class LocalCopies:
    """Copies in a directory, which every worker must reach by the same path."""

    directory: Path

    def _directory_of(self, segment: SegmentFile) -> Path:
        return self.directory / copy_name(segment)

    def has(self, segment: SegmentFile) -> bool:
        return (self._directory_of(segment) / "facts.json").exists()

    def facts_of(self, segment: SegmentFile) -> Scanned:
        return decode_facts((self._directory_of(segment) / "facts.json").read_bytes())

    def write(self, segment: SegmentFile, tables: Mapping[str, pa.Table], facts: Scanned) -> None:
        copy = self._directory_of(segment)
        copy.mkdir(parents=True, exist_ok=True)
        for abandoned in copy.glob("*.tmp"):
            if time.time() - abandoned.stat().st_mtime > _LEFT_SECONDS:
                abandoned.unlink(missing_ok=True)
        for name, table in tables.items():
            temporary = copy / f"{name}.{uuid.uuid4().hex}.tmp"  # containers that share it may have the same pid
            pq.write_table(table, temporary, **WRITING)
            temporary.rename(copy / f"{name}.parquet")
        crash_point.reached("copy.before_facts")
        temporary = copy / f"facts.{uuid.uuid4().hex}.tmp"
        temporary.write_bytes(msgspec.json.encode(facts))
        temporary.rename(copy / "facts.json")

    def note(self, made: Mapping[str, Scanned]) -> None:
        """Does nothing: the directory has the facts of each copy."""

    def keep(self, wanted: set[str]) -> None:
        for name in [entry.name for entry in self.directory.iterdir()]:
            if name not in wanted:
                self._forget(name)

    def longest_unread(self, copied: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
        def compared_ns(segment: SegmentFile) -> int:
            return (self._directory_of(segment) / "facts.json").stat().st_mtime_ns

        return fitting(sorted(copied, key=compared_ns), most_bytes)

    def compared(self, segment: SegmentFile) -> None:
        os.utime(self._directory_of(segment) / "facts.json")

    def forget(self, segment: SegmentFile) -> None:
        self._forget(copy_name(segment))

    def _forget(self, name: str) -> None:
        """Removes the facts first, so that after a kill the remaining files do not count as a copy."""
        copy = self.directory / name
        (copy / "facts.json").unlink(missing_ok=True)
        crash_point.reached("copy.forgetting")
        for file in copy.iterdir():
            file.unlink()
        copy.rmdir()

    def release(self) -> None:
        """Does nothing: facts are read when they are asked for."""

    def rows(
        self, spark: SparkSession, table: str, schema: pa.Schema, segments: Sequence[tuple[SegmentFile, int]]
    ) -> DataFrame:
        paths = [literal_path(self._directory_of(segment) / f"{table}.parquet") for segment, _ in segments]
        return spark.read.schema(spark_schema(schema)).parquet(*paths)

    def read(self, table: str, segment: SegmentFile, **options: Any) -> pa.Table:
        return pq.read_table(self._directory_of(segment) / f"{table}.parquet", **options)


def literal_path(path: Path) -> str:
    """A path of this machine as Spark takes it: in its local file system, whatever Hadoop's configuration says is the
    default one, and with the signs escaped that it would take for a pattern (SPARK-32810)."""
    return "file://" + _PATTERN_SIGNS.sub(r"\\\g<0>", str(path.absolute()))
