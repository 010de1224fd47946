"""Rows with other columns are added to a table: nobody loses a column by it, and every row stays readable."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import from_arrow_schema

from notify.errors import InvalidRequest
from notify.object_store.store import Store
from notify.spark.tables import manifest as manifests
from notify.spark.tables.reading import urls_of
from notify.spark.tables.source import NotifyTable

PLACE = {"topic": pa.string(), "topic_number": pa.int32(), "queue": pa.int32(), "offset": pa.int64()}
TEXT, INT, LONG, DOUBLE = pa.string(), pa.int32(), pa.int64(), pa.float64()


class Table:
    """A table, written and read by its data source without a session of Spark."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._next = 0

    def add(self, columns: dict[str, pa.DataType], *rows: dict[str, Any]) -> None:
        """Add rows with these columns and their place."""
        schema = pa.schema(PLACE | columns)
        writer = NotifyTable({"path": self._url}).writer(from_arrow_schema(schema), False)
        made = []
        for row in rows:
            made.append({"topic": "t", "topic_number": 1, "queue": 0, "offset": self._next} | row)
            self._next += 1
        batch = pa.RecordBatch.from_pylist(made, schema)
        writer.commit([writer.write(iter([batch]))])  # type: ignore[list-item]

    def rows(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The names of the columns, and the rows without their place."""
        source = NotifyTable({"path": self._url})
        schema = source.schema()
        reader = source.reader(schema)
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        rows = pa.Table.from_batches(batches).to_pylist()
        names = schema.names[4:]
        return names, [{name: row[name] for name in names} for row in sorted(rows, key=lambda row: row["offset"])]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(f"file://{tmp_path}/lake")


def test_a_column_that_later_rows_lack_stays(table: Table) -> None:
    table.add({"item": TEXT, "value": pa.struct({"a": INT, "b": TEXT})}, {"item": "x", "value": {"a": 1, "b": "y"}})
    table.add({"value": pa.struct({"b": TEXT, "c": DOUBLE})}, {"value": {"b": "z", "c": 2.5}}, {"value": None})
    table.add({}, {})
    names, rows = table.rows()
    assert names == ["item", "value"]
    assert rows == [
        {"item": "x", "value": {"a": 1, "b": "y", "c": None}},
        {"item": None, "value": {"a": None, "b": "z", "c": 2.5}},
        {"item": None, "value": None},
        {"item": None, "value": None},
    ]


@pytest.mark.parametrize(
    ("first", "then", "rows"),
    [
        (DOUBLE, INT, (1.5, 2)),
        (INT, DOUBLE, (1, 2.5)),
        (LONG, INT, (1 << 60, 2)),
        (pa.list_(INT), pa.list_(LONG), ([1], [1 << 60])),
        (pa.decimal128(10, 2), pa.decimal128(6, 4), (Decimal("12345678.90"), Decimal("1.2345"))),
    ],
)
def test_a_type_becomes_wider_and_never_narrower(
    table: Table, first: pa.DataType, then: pa.DataType, rows: Sequence[Any]
) -> None:
    table.add({"n": first}, {"n": rows[0]})
    table.add({"n": then}, {"n": rows[1]})
    assert [row["n"] for row in table.rows()[1]] == list(rows)


def test_fields_within_maps_and_lists_come_together(table: Table) -> None:
    table.add({"m": pa.map_(TEXT, pa.struct({"a": INT})), "l": pa.list_(pa.struct({"a": INT}))},
              {"m": [("k", {"a": 1})], "l": [{"a": 1}]})  # fmt: skip
    table.add({"m": pa.map_(TEXT, pa.struct({"b": INT})), "l": pa.list_(pa.struct({"b": INT}))},
              {"m": [("k", {"b": 2})], "l": [{"b": 2}]})  # fmt: skip
    first, second = table.rows()[1]
    assert first == {"m": [("k", {"a": 1, "b": None})], "l": [{"a": 1, "b": None}]}
    assert second == {"m": [("k", {"a": None, "b": 2})], "l": [{"a": None, "b": 2}]}


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ({"n": DOUBLE}, {"n": TEXT}, "column n is double in the table, and string"),
        ({"n": LONG}, {"n": DOUBLE}, "column n is bigint"),
        ({"v": pa.struct({"a": INT})}, {"v": pa.struct({"a": pa.date32()})}, r"column v\.a is int"),
        ({"item": TEXT}, {"ITEM": TEXT}, "column item, and these rows have ITEM"),
        ({"n": pa.decimal128(38, 0)}, {"n": pa.decimal128(38, 10)}, "decimal"),
        ({}, {"v": pa.struct({"a": pa.list_(pa.null())})}, "column v is struct<a:array<void>>, which no later value"),
    ],
)
def test_incompatible_columns_are_refused_before_a_row_is_written(
    table: Table, first: dict[str, pa.DataType], then: dict[str, pa.DataType], told: str
) -> None:
    table.add(first, {})
    before = table.rows()
    with pytest.raises(InvalidRequest, match=told):
        table.add(then, {})
    assert table.rows() == before


@pytest.mark.parametrize("name", PLACE)
def test_a_row_that_is_no_message_is_refused(table: Table, name: str) -> None:
    table.add({"item": TEXT}, {"item": "x"})
    with pytest.raises(InvalidRequest, match=f"a row has no {name}: leave out"):
        table.add({"item": TEXT}, {"item": "y"}, {name: None})
    assert table.rows()[1] == [{"item": "x"}]


def test_a_table_of_an_earlier_version_begins_with_its_newest_file(table: Table, tmp_path: Path) -> None:
    table.add({"item": TEXT}, {"item": "x"})
    store = Store(f"file://{tmp_path}/lake")
    written = manifests.load(store)
    store.replace_checked(manifests.NAME, manifests._encode(replace(written, columns={})), manifests.MOST_BYTES)
    assert table.rows() == (["item"], [{"item": "x"}])
    table.add({"n": INT}, {"n": 1})
    assert table.rows()[0] == ["item", "n"]


def test_times_are_in_utc_whatever_the_writers_session_has(table: Table, tmp_path: Path) -> None:
    table.add({"at": pa.timestamp("us", tz="America/New_York")}, {"at": 1_790_000_000_000_000})
    (url,) = urls_of(f"file://{tmp_path}/lake")
    column = pq.read_table(url.removeprefix("file://"))["at"]
    assert (str(column.type), column.cast(pa.int64()).to_pylist()) == ("timestamp[us, tz=UTC]", [1_790_000_000_000_000])
