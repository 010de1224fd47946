"""`notify_table`: a table with a manifest as a Python Data Source of Spark, to read, and to stream messages into.

    spark.dataSource.register(NotifyTable)
    orders.writeStream.format("notify_table").option("checkpointLocation", …).start("s3://lake/orders")
    spark.read.format("notify_table").load("s3://lake/orders")

Workers reach the store through its own library, so that no jar of Hadoop is needed. The option `table` names one of
several tables under one manifest, to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from notify.errors import InvalidRequest
from notify.object_store.store import Store
from notify.spark.tables import manifest as manifests
from notify.spark.tables.columns import fitted, together
from notify.spark.tables.manifest import File, Manifest
from notify.spark.tables.messages import Written, add, check_columns, known_of, write
from notify.spark.tables.reading import files_of, read_file, schema_of


class NotifyTable(DataSource):
    """The data source; the module's docstring describes it."""

    @classmethod
    def name(cls) -> str:
        return "notify_table"

    def _url(self) -> str:
        url = self.options.get("path", "")
        if not url:
            raise InvalidRequest('name the table\'s URL: load("file:///lake/orders") or start("s3://lake/orders")')
        return url

    def schema(self) -> StructType:
        url, table = self._url(), self.options.get("table", "")
        files = files_of(url, table)
        return _columns_of(url, manifests.load(Store(url)), files, table)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(self._url(), self.options.get("table", ""), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer(self._url(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _StreamWriter(self._url(), schema, overwrite)


def _columns_of(url: str, manifest: Manifest, files: list[File], table: str = "") -> StructType:
    """The columns of a table; of one that an earlier version wrote, those of its newest file."""
    if manifest.columns and not table:
        return StructType.fromJson(manifest.columns)
    return from_arrow_schema(schema_of(url, files))


class _Reader(DataSourceReader):
    def __init__(self, url: str, table: str, schema: StructType) -> None:
        self._url, self._table, self._schema = url, table, schema

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(file) for file in files_of(self._url, self._table)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from fitted(read_file(Store(self._url), partition.value).to_batches(), self._schema)


@dataclass
class _Stored(WriterCommitMessage):
    """The files that one task wrote."""

    written: list[Written] = field(default_factory=list)


class _Adding:
    """Adds rows to the table: workers write files, and the driver lists them."""

    def __init__(self, url: str, schema: StructType, overwrite: bool) -> None:
        check_columns(schema.names)
        if overwrite:
            raise InvalidRequest('a table is only added to: use mode("append"), and of a stream the output mode append')
        self._url = url
        store = Store(url)
        manifest = manifests.load(store)
        self._known = known_of(manifest)
        files = list(manifests.files_of(store, manifest)) if not manifest.columns else []
        known = _columns_of(url, manifest, files) if manifest.columns or files else StructType()
        self._columns = together(known, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _Stored(write(fitted(iterator, self._columns), Store(self._url), self._known))

    def _add(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        stored = [message for message in messages if isinstance(message, _Stored)]
        add(Store(self._url), [written for message in stored for written in message.written], self._columns.jsonValue())


class _Writer(_Adding, DataSourceArrowWriter):
    def commit(self, messages: list[Any]) -> None:
        self._add(messages)


class _StreamWriter(_Adding, DataSourceStreamArrowWriter):
    def commit(self, messages: list[Any], batchId: int) -> None:
        self._add(messages)
