"""`notify_log`: a server's log as a Python Data Source of Spark. Each segment is a partition.

    spark.dataSource.register(NotifyLogSource)
    spark.read.format("notify_log").option("path", "notify-data").option("table", "queue").load()

| option | |
|---|---|
| `path` | the data directory of a server, running or not, or a copy of it; or the URL of a store that it ships to |
| `table` | `messages`, `queue`, `acks` (spark.columns.MESSAGES, QUEUE, ACKS), or `halves`, a view of `messages` |
| `columns` | names separated by commas; Spark does not tell a Python source which columns a query needs |
| `from` | `index` (default): read only the index of sealed segments; `log`: read and verify everything |

A comparison of a time with a constant skips segments. `acks` always reads the log, because it has no index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from notify.errors import Corrupt, InvalidRequest, NotifyError, Unavailable
from notify.spark.inputs.columns import ACKS, MESSAGES, QUEUE, messages_of, queue_of, spark_schema
from notify.spark.inputs.find_log import files_of
from notify.spark.inputs.log_files import LogFiles, SegmentFile
from notify.spark.inputs.scan import SegmentScan

TABLES = {"messages": MESSAGES, "halves": MESSAGES, "queue": QUEUE, "acks": ACKS}
ROWS_A_BATCH = 1 << 16
SLACK_US = 60_000_000
MOST_NAMED = 20
"""The most segments that an error names."""
_MASKS = ("acked", "settled", "attempted", "acked_us", "last_acked_us", "groups")


class NotifyLogSource(DataSource):
    """The data source; the module's docstring describes its options."""

    @classmethod
    def name(cls) -> str:
        return "notify_log"

    def schema(self) -> str:
        return spark_schema(self._fields())

    def _fields(self) -> list[pa.Field]:
        table = self.options.get("table", "messages")
        if table not in TABLES:
            raise InvalidRequest(f"option table: there is no table {table!r}; use one of {', '.join(TABLES)}")
        names = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
        schema = TABLES[table]
        unknown = set(names) - set(schema.names)
        if unknown:
            raise InvalidRequest(f"option columns: {table} has no {', '.join(sorted(unknown))}")
        if not names and self.options.get("from", "index") == "index" and table != "acks":
            names = [name for name in schema.names if name not in _MASKS]  # the index has no masks
        return [schema.field(name) for name in names or schema.names]

    def reader(self, schema: Any) -> DataSourceReader:
        if "path" not in self.options:
            raise InvalidRequest("option path: name the data directory of a server")
        by_index = self.options.get("from", "index") == "index"
        return _Reader(
            self.options["path"],
            self.options.get("table", "messages"),
            [field.name for field in self._fields()],
            by_index,
        )


class _Reader(DataSourceReader):
    def __init__(self, path: str, table: str, columns: Sequence[str], by_index: bool) -> None:
        self._files: LogFiles = files_of(path)
        self._table = table
        self._columns = list(columns)
        self._by_index = by_index and table != "acks" and not set(columns) & set(_MASKS)
        self._from_us, self._to_us = 0, 1 << 62

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use comparisons of times to skip segments. All filters are returned, and Spark applies them to the rows."""
        for pushed in filters:
            # A record has the time of its request, which is a moment before its frame is written.
            if isinstance(pushed, _COMPARISONS) and pushed.attribute[-1] in ("half_us", "queued_us", "at_us"):
                value = int(pushed.value)
                if isinstance(pushed, GreaterThan | GreaterThanOrEqual | EqualTo):
                    self._from_us = max(self._from_us, value)
                if isinstance(pushed, LessThan | LessThanOrEqual | EqualTo):
                    self._to_us = min(self._to_us, value + SLACK_US)
            yield pushed

    def partitions(self) -> Sequence[InputPartition]:
        segments, problems = self._files.segments()
        if problems:
            raise Corrupt("; ".join([*problems[:MOST_NAMED], *filter(None, [self._files.gone()])]))
        if not segments:
            raise InvalidRequest(f"{self._files.place}: {self._files.nothing}")
        return [
            InputPartition(segment)
            for segment in segments
            if segment.until_us >= self._from_us and segment.created_us <= self._to_us
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        try:
            table = self._read(partition.value)
        except NotifyError as error:
            if why := self._files.gone():
                raise Unavailable(f"{error}; {why}") from None
            raise
        if self._table == "halves":
            table = table.filter(pc.or_(table["half_us"].is_valid(), table["queued_us"].is_null()))
        yield from table.select(self._columns).to_batches(max_chunksize=ROWS_A_BATCH)

    def _read(self, segment: SegmentFile) -> pa.Table:
        if self._by_index and segment.sealed_end:
            entries = self._files.entries(segment)
            if entries is not None:
                return queue_of(entries, self._columns) if self._table == "queue" else messages_of(entries)
        disk = self._files.disk(segment)
        scan = SegmentScan(disk, segment.name, segment.sealed_end)
        if self._files.is_immutable:
            self._files.crc_of(disk, segment)  # raises if the object differs from the shipped bytes
        if self._table == "queue":
            return scan.messages.filter(scan.messages["offset"].is_valid())
        return scan.acks if self._table == "acks" else scan.messages


_COMPARISONS = (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
