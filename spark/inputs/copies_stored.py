"""Copies of a log's segments in an object store, for workers that share no path.

`facts.json` holds the facts of all copies, so that this process reads only one object. It is replaced once the tasks of
an audit have written their tables; a copy that it does not list does not count. Spark's workers read the tables through
a Python Data Source, because Spark itself would need a library of Hadoop for each kind of store.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from notify.errors import ObjectStoreFailed
from notify.object_store.store import ObjectMissing, Store
from notify.protocol.wire import UNDECODABLE
from notify.spark.inputs.columns import spark_schema
from notify.spark.inputs.copies import WRITING, copy_name, decode_facts, fitting
from notify.spark.inputs.facts import Scanned
from notify.spark.inputs.log_files import SegmentFile
from notify.spark.inputs.stored_file import opened

MOST_BYTES = 1 << 30
"""The most bytes of the facts of all copies: about 500,000 segments."""
MOST_FORGOTTEN = 500
"""The most copies that one audit removes from the store."""
ROWS_A_PARTITION = 500_000
"""One task reads copies of at most this many rows together."""
ROWS_A_BATCH = 1 << 16
TABLES = ("messages", "acks", "checks", "letters")
_FACTS = "facts.json"
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass
class StoredCopies:
    """Copies below a URL. The pickled form, for workers, has no facts."""

    url: str
    facts: dict[str, msgspec.Raw] = field(default_factory=dict, repr=False)
    """The facts of each copy as JSON, by its name."""

    @classmethod
    def of(cls, url: str) -> StoredCopies:
        """Reads the facts of the copies below the URL. Raises ObjectStoreFailed."""
        store = Store(url)
        try:
            return cls(store.url, _decode(store.read(_FACTS, MOST_BYTES)))
        except (ObjectMissing, *UNDECODABLE):  # without its facts a copy is made again
            return cls(store.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredCopies, (self.url,)

    @cached_property
    def _store(self) -> Store:
        return Store(self.url)

    def has(self, segment: SegmentFile) -> bool:
        return copy_name(segment) in self.facts

    def facts_of(self, segment: SegmentFile) -> Scanned:
        return decode_facts(self.facts[copy_name(segment)])

    def write(self, segment: SegmentFile, tables: Mapping[str, pa.Table], facts: Scanned) -> None:
        for name, table in tables.items():
            self._store.put(f"{copy_name(segment)}/{name}.parquet", partial(_fill, table))

    def note(self, made: Mapping[str, Scanned]) -> None:
        if made:
            self.facts |= {name: msgspec.Raw(msgspec.json.encode(scanned)) for name, scanned in made.items()}
            self._store.replace(_FACTS, msgspec.json.encode(self.facts))

    def keep(self, wanted: set[str]) -> None:
        unwanted = sorted(set(self.facts) - wanted)[:MOST_FORGOTTEN]
        for name in unwanted:
            del self.facts[name]
        if unwanted:
            self._store.replace(_FACTS, msgspec.json.encode(self.facts))
        for name in unwanted:
            for table in TABLES:
                self._store.delete(f"{name}/{table}.parquet")

    def longest_unread(self, copied: Iterable[SegmentFile], most_bytes: int) -> list[SegmentFile]:
        """The first segments in log order: the store does not record when each was compared."""
        return fitting(copied, most_bytes)

    def compared(self, segment: SegmentFile) -> None:
        """Does nothing: the store does not record when a segment was compared."""

    def forget(self, segment: SegmentFile) -> None:
        """Does nothing: a new copy replaces the old one."""

    def release(self) -> None:
        self.facts.clear()

    def rows(
        self, spark: SparkSession, table: str, schema: pa.Schema, segments: Sequence[tuple[SegmentFile, int]]
    ) -> DataFrame:
        spark.dataSource.register(CopiesSource)
        parts: list[list[str]] = [[]]
        rows = 0
        for segment, size in segments:
            if parts[-1] and rows + size > ROWS_A_PARTITION:
                parts.append([])
                rows = 0
            parts[-1].append(copy_name(segment))
            rows += size
        options = {"url": self.url, "table": table, "parts": json.dumps(parts), "schema": spark_schema(schema)}
        return spark.read.format(CopiesSource.name()).options(**options).load()

    def read(self, table: str, segment: SegmentFile, **options: Any) -> pa.Table:
        with _telling(self._store):
            return pq.read_table(_opened(self._store, f"{copy_name(segment)}/{table}.parquet"), **options)


def _fill(table: pa.Table, sink: Any) -> None:
    pq.write_table(table, sink, **WRITING)


@contextmanager
def _telling(store: Store) -> Iterator[None]:
    """Raises ObjectStoreFailed, saying what to do, where a copy that is listed is gone or cannot be read."""
    try:
        yield
    except (ObjectMissing, pa.ArrowException) as error:
        raise ObjectStoreFailed(
            f"the copies of segments in {store.url} are not whole ({error}): delete {store.url}/{_FACTS}, and the next "
            "audit makes them again"
        ) from None


def _opened(store: Store, name: str) -> io.BufferedReader:
    return opened(store, name, store.size(name))


class CopiesSource(DataSource):
    """A table of copies in a store. Options: `url`, `table`, `parts` (lists of names, as JSON) and `schema`."""

    @classmethod
    def name(cls) -> str:
        return "notify_copies"

    def schema(self) -> str:
        return str(self.options["schema"])

    def reader(self, schema: Any) -> DataSourceReader:
        columns = [field.split()[0] for field in self.options["schema"].split(", ")]
        return _Reader(self.options["url"], self.options["table"], json.loads(self.options["parts"]), columns)


class _Reader(DataSourceReader):
    def __init__(self, url: str, table: str, parts: list[list[str]], columns: list[str]) -> None:
        self._url = url
        self._table = table
        self._parts = parts
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(names) for names in self._parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        store = Store(self._url)
        with _telling(store):
            for name in partition.value:
                file = pq.ParquetFile(_opened(store, f"{name}/{self._table}.parquet"), pre_buffer=True)
                for batch in file.iter_batches(batch_size=ROWS_A_BATCH, columns=self._columns):
                    yield batch.select(self._columns)
