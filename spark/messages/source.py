"""`notify`: the messages of topics as a Python Data Source of Spark, for batches and streams.

    spark.dataSource.register(NotifySource)
    spark.readStream.format("notify").option("servers", url).option("topics", "orders").load()

Columns: those of columns.py, and with the option `schema` also `value` and `rescued` (typed.py). docs/reference.md has
the options, and docs/lakehouse.md says how to use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from notify.errors import InvalidRequest
from notify.spark.messages import offsets
from notify.spark.messages.columns import RESCUED, TYPES, VALUE, types_of
from notify.spark.messages.infer import inferred
from notify.spark.messages.options import EARLIEST, INFER, LATEST, Options
from notify.spark.messages.planning import Planning
from notify.spark.messages.reading import Piece, Reading
from notify.spark.messages.typed import TypedBodies


class NotifySource(DataSource):
    """The data source; the module's docstring describes it."""

    @classmethod
    def name(cls) -> str:
        return "notify"

    def schema(self) -> str:
        options = self._options(EARLIEST)
        types = types_of(inferred(options) if options.schema.lower() == INFER else options.schema)
        if unknown := set(options.columns) - set(types):
            raise InvalidRequest(
                f"option columns: there is no {', '.join(sorted(unknown))}; there are {', '.join(types)}"
            )
        return ", ".join(f"{name} {types[name]}" for name in options.columns or types)

    def _options(self, default_start: str) -> Options:
        return Options.of(self.options, default_start)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Batch(self._options(EARLIEST), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _Stream(self._options(LATEST), schema)


class _Rows:
    """Reads pieces, with the columns that a query has."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        unknown = set(schema.names) - {*TYPES, VALUE, RESCUED}
        if unknown:
            raise InvalidRequest(
                f"there is no column {', '.join(sorted(unknown))}: leave out .schema(…), and give the type of JSON "
                "bodies with the option schema"
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Piece):
            return  # there is nothing to read
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        typed = None
        if VALUE in self._schema.names or RESCUED in self._schema.names:
            if VALUE not in self._schema.names:
                raise InvalidRequest("option columns: name value, too, where you name rescued")
            typed = TypedBodies(cast(StructType, self._schema[VALUE].dataType), arrow.field(VALUE).type)
        with Reading(self._options) as reading:
            for batch in reading.rows(partition):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                if typed is not None:
                    columns[VALUE], columns[RESCUED] = typed.columns(batch.column("body").to_pylist())
                yield pa.RecordBatch.from_arrays([columns[f.name].cast(f.type) for f in arrow], schema=arrow)


class _Batch(_Rows, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        with closing(Planning(self._options)) as planning:
            start, end = planning.beginning(), planning.ending()
            return planning.pieces(start, end)


class _Stream(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._planning: Planning | None = None
        self._until: offsets.Offsets | None = None
        """The end of a query that reads only what is available now."""

    def __getstate__(self) -> dict[str, Any]:
        """The state that goes to the workers, which plan nothing."""
        return self.__dict__ | {"_planning": None}

    def _plan(self) -> Planning:
        if self._planning is None:
            self._planning = Planning(self._options)
        return self._planning

    def initialOffset(self) -> dict[str, Any]:
        return offsets.to_json(self._plan().beginning())

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.rows_per_trigger)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return offsets.to_json(self._plan().following(offsets.from_json(start), most, self._until))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return offsets.to_json(self._plan().latest())

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._plan().latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._plan().pieces(offsets.from_json(start), offsets.from_json(end))

    def stop(self) -> None:
        if self._planning is not None:
            self._planning.close()
            self._planning = None
