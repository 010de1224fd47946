"""Adding messages to a table, each once, by its offset.

The manifest has the files and how far each queue is in the table; both change in one step. So repeated rows add
nothing, even after a kill in between and with any checkpoint.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from notify.errors import InvalidRequest, ObjectStoreFailed
from notify.object_store.store import Store
from notify.spark.messages.offsets import TopicOffsets, from_json, to_json
from notify.spark.tables import manifest as manifests
from notify.spark.tables.manifest import File, Manifest

PLACE = ("topic", "topic_number", "queue", "offset")
"""The columns that say which message a row is."""
GROUP_ROWS = 20_000
MOST_FILE_BYTES = 64 << 20
"""A larger file is complete: a task may have any number of rows, and has one file in memory."""

Queue = tuple[str, int, int]
"""A topic, its number, and the queue's."""
Next = dict[str, tuple[int, dict[int, int]]]
"""For each topic its number, and for each queue the next offset."""


@dataclass(frozen=True)
class Written:
    """A file that is stored, and not listed yet."""

    file: File
    first: dict[Queue, int] = field(default_factory=dict)
    """For each queue its first offset in the file; `behind`: the offset after its last one."""
    behind: dict[Queue, int] = field(default_factory=dict)


def check_columns(names: Iterable[str]) -> None:
    """Raises InvalidRequest for rows that do not say which messages they are."""
    if missing := [name for name in PLACE if name not in set(names)]:
        raise InvalidRequest(f"rows need the columns {', '.join(PLACE)}; {', '.join(missing)} is missing")


def known_of(manifest: Manifest) -> Next:
    """How far each queue is in a table."""
    return {topic: (each.number, dict(each.next)) for topic, each in from_json(manifest.offsets).items()}


def write(batches: Iterator[pa.RecordBatch], store: Store, known: Next) -> list[Written]:
    """Store the rows that the table lacks, in files. Raises ObjectStoreFailed."""
    written: list[Written] = []
    growing: _Growing | None = None
    for batch in batches:
        new = _new_of(batch, known)
        if not new.num_rows:
            continue
        growing = growing or _Growing(new.schema)
        growing.add(new)
        if growing.size >= MOST_FILE_BYTES:
            written.append(growing.put(store))
            growing = None
    if growing is not None:
        written.append(growing.put(store))
    return written


def add(store: Store, written: Sequence[Written], columns: dict[str, Any] | None = None) -> Manifest:
    """List files, and note how far the table goes with them; returns the new manifest. `columns`: those of the table
    with these rows, if they are known. Raises ObjectStoreFailed."""
    manifest = manifests.load(store)
    if not written:
        return manifest
    known = known_of(manifest)
    for each in written:
        for (topic, number, queue), first in each.first.items():
            had, next_ = known.get(topic, (number, {}))
            if had > number or (had == number and first < next_.get(queue, 0)):
                raise ObjectStoreFailed(
                    f"another writer added messages of {topic!r} to {store.url} meanwhile: a table has one writer at a "
                    "time; stop the other one and try again"
                )
    behind: dict[Queue, int] = {}
    for each in written:
        for key, offset in each.behind.items():
            behind[key] = max(behind.get(key, 0), offset)
    after = msgspec.structs.replace(
        manifest, files=(*manifest.files, *[each.file for each in written]), offsets=_further(known, behind),
        columns=manifest.columns if columns is None else columns,
    )  # fmt: skip
    return manifests.replace(store, manifest, manifests.with_page(store, after))


class _Growing:
    """A file that is written in memory: a store that fails is given the same bytes again."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)
        self._first: dict[Queue, int] = {}
        self._behind: dict[Queue, int] = {}
        self._rows = 0

    @property
    def size(self) -> int:
        """Bytes so far."""
        return int(self._sink.tell())

    def add(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch, row_group_size=GROUP_ROWS)
        self._rows += batch.num_rows
        offsets = batch.column("offset").to_numpy()
        for key, rows in _queues_of(batch):
            first, last = int(offsets[rows].min()), int(offsets[rows].max())
            self._first[key] = min(self._first.get(key, first), first)
            self._behind[key] = max(self._behind.get(key, 0), last + 1)

    def put(self, store: Store) -> Written:
        """Store the file. Raises ObjectStoreFailed."""
        self._writer.close()
        data = memoryview(self._sink.getvalue())
        # The time is for cleaning up: a file that no manifest lists after a day will never be listed.
        name = f"data/{time.time_ns() // 1000:016d}-{uuid.uuid4().hex}.parquet"
        size, sha256 = store.put(name, lambda sink: sink.write(data))
        return Written(File(name, self._rows, size, sha256), self._first, self._behind)


def _new_of(batch: pa.RecordBatch, known: Next) -> pa.RecordBatch:
    """The rows that the table does not have. Raises InvalidRequest for a row that names no message."""
    for name in PLACE:
        if batch.column(name).null_count:
            raise InvalidRequest(f"a row has no {name}: leave out rows that are not messages")
    keep = np.ones(batch.num_rows, bool)
    offsets = batch.column("offset").to_numpy()
    for (topic, number, queue), rows in _queues_of(batch):
        had, next_ = known.get(topic, (number, {}))
        if had > number:
            keep &= ~rows  # of a topic that was deleted, and whose successor is in the table
        elif had == number:
            keep &= ~(rows & (offsets < next_.get(queue, 0)))
    return batch if keep.all() else batch.filter(pa.array(keep))


def _queues_of(batch: pa.RecordBatch) -> Iterator[tuple[Queue, NDArray[np.bool_]]]:
    """The queues that a batch has rows of, and which rows these are."""
    places = pa.Table.from_batches([batch.select(PLACE[:3])])
    for row in places.group_by(list(PLACE[:3])).aggregate([]).to_pylist():
        of = [pc.equal(batch.column(name), row[name]) for name in PLACE[:3]]
        is_in = pc.and_(pc.and_(of[0], of[1]), of[2]).to_numpy(zero_copy_only=False)
        yield (row["topic"], row["topic_number"], row["queue"]), is_in


def _further(known: Next, behind: dict[Queue, int]) -> dict[str, Any]:
    """The offsets after these messages."""
    offsets = {topic: (number, dict(queues)) for topic, (number, queues) in known.items()}
    for (topic, number, queue), offset in sorted(behind.items()):
        had, queues = offsets.get(topic, (number, {}))
        if had != number:
            queues = {}  # the topic was recreated
        queues[queue] = max(queues.get(queue, 0), offset)
        offsets[topic] = (number, queues)
    return to_json({topic: TopicOffsets(number, queues) for topic, (number, queues) in offsets.items()})
