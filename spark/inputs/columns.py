"""The columns of a segment: their schemas, and how they are made from index entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from notify.protocol.wire import NO_DATABASE
from notify.spark.digest import hashes
from notify.storage.log.entry import EntryKind, due_times

ATTEMPTED = 100
"""A value of the column `kind` of ACKS: an attempt failed. The other values are those of SettleKind."""
COMMITTED, ROLLED_BACK = 1, 2
WITHDRAWN, TAKES_NO_PLACE = 1, 2
"""A delayed message was withdrawn; a withdrawal takes no place in a queue."""

MESSAGES = pa.schema(
    [
        ("id", pa.binary()),
        ("no", pa.int32()),
        ("producer_group", pa.int32()),  # number of its name; 0: sent without a transaction
        ("source", pa.int64()),  # hash of the id of the half's database, see name_hash; null: unknown
        ("half_us", pa.int64()),  # when the half was stored
        ("outcome", pa.int8()),  # 1 COMMITTED, 2 ROLLED_BACK, 0 no outcome in this segment
        ("decided_us", pa.int64()),
        ("due_us", pa.int64()),  # when a delayed message is due
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),  # number of its name; the half's topic if the message is in no queue
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("size", pa.int32()),
        ("position", pa.int64()),  # of the payload in the log
        ("digest", pa.int64()),  # of the contents, as digest.hashes makes it; null: the payload is not in this segment
        ("id_hash", pa.int64()),  # of the message's id, as spark.digest.hashes makes it
        ("body_hash", pa.int64()),  # of the message's id and the digest of its contents; null without a digest
        # Each group's progress with the message in this segment: bit n belongs to the nth group in the segment's list.
        ("acked", pa.int64()),
        ("settled", pa.int64()),
        ("attempted", pa.int64()),
        ("acked_us", pa.int64()),
        ("last_acked_us", pa.int64()),
        ("groups", pa.int64()),  # number of that list, see list_number
        ("withdrawn", pa.int8()),  # WITHDRAWN, TAKES_NO_PLACE or both; null: neither in this segment
    ]
)
ACKS = pa.schema(
    [
        ("id", pa.binary()),  # null if the message is in another segment
        ("no", pa.int32()),
        ("consumer_group", pa.int64()),  # hash of its name, see name_hash
        ("kind", pa.int16()),
        ("at_us", pa.int64()),
        ("queued_us", pa.int64()),
        ("topic", pa.int64()),
        ("queue", pa.int32()),
        ("offset", pa.int64()),
        ("key_hash", pa.int64()),
        ("attempts", pa.int32()),
        ("seq", pa.int64()),  # position of the record: the order of events
        ("is_loose", pa.bool_()),  # whether the columns acked, settled, … of messages lack this row
    ]
)
CHECKS = pa.schema([("id", pa.binary()), ("answered", pa.int32()), ("parked", pa.bool_()), ("at_us", pa.int64())])
"""The answers to checks that did not decide the transaction."""
MASK_GROUPS = 62
QUEUE = pa.schema(
    [MESSAGES.field(n) for n in ("id", "no", "producer_group", "topic", "queue", "offset", "queued_us")]
    + [MESSAGES.field(n) for n in ("key_hash", "size", "position")]
)
"""The messages in queues, from the index: a row for each place of a message."""

_RELAY_PREFIX = "relay-"
SOURCE = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
"""The id of a database (notify_source), as a regular expression."""
_SPARK_TYPES = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}


def source_of(name: str) -> str:
    """The id of the database that a sender's name contains; "" if the name contains no such id.

    The name of a relay by position is `relay-` and the id of its database. A bridge may have any name.
    """
    source = name.removeprefix(_RELAY_PREFIX)
    return source if re.match(SOURCE, source) else ""


def origin_of(name: str) -> str:
    """As `source_of`; NO_DATABASE if the name says that the sender's transactions are in no database."""
    return name if name == NO_DATABASE else source_of(name)


def name_hash(name: str) -> int:
    """The number that columns hold in place of a name, such as a database's id or a group's name; 0 for ""."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True) if name else 0


def with_bits(names: Sequence[str]) -> tuple[str, ...]:
    """The groups of a segment that have a bit in the masks, in the order of their bits.

    Instances of a broadcast have no bit; they are at the end of a segment's groups.
    """
    return tuple(name for name in names[:MASK_GROUPS] if "@" not in name)


def list_number(names: Sequence[str]) -> int:
    """The number that rows hold in place of their segment's list of groups."""
    return name_hash("\n".join(with_bits(names)))


def spark_schema(fields: Iterable[pa.Field]) -> str:
    """Spark's schema of Arrow fields, as text."""
    return ", ".join(f"{f.name} {_SPARK_TYPES.get(str(f.type), str(f.type))}" for f in fields)


def places(queued: NDArray[np.void], keys: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row in `queued` of each (topic << 16 | queue, offset); -1 if there is no such row."""
    if not len(queued) or not len(keys):
        return np.full(len(keys), -1, np.int64)
    queued_keys = queued["topic"].astype(np.int64) << 16 | queued["queue"]
    order = np.lexsort((queued["offset"], queued_keys))
    queued_keys, queued_offsets = queued_keys[order], queued["offset"][order].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, queued_keys[1:] != queued_keys[:-1]])
    counts = np.diff(np.r_[starts, len(queued_keys)])
    run = np.minimum(np.searchsorted(queued_keys[starts], keys), len(starts) - 1)
    # The offsets of a queue are contiguous except for holes. Behind a hole the row lies before the guessed place.
    guess = starts[run] + np.clip(offsets - queued_offsets[starts[run]], 0, counts[run] - 1)
    is_match = (queued_keys[guess] == keys) & (queued_offsets[guess] == offsets)
    for row in np.flatnonzero(~is_match & (queued_keys[starts[run]] == keys)).tolist():
        first = int(starts[run[row]])
        place = first + int(np.searchsorted(queued_offsets[first : first + int(counts[run[row]])], offsets[row]))
        if place < len(order) and queued_keys[place] == keys[row] and queued_offsets[place] == offsets[row]:
            guess[row], is_match[row] = place, True
    return np.where(is_match, order[guess], -1)


def queue_of(entries: NDArray[np.void], columns: Sequence[str]) -> pa.Table:
    """The given columns of QUEUE, from index entries."""
    rows = entries[entries["kind"] == EntryKind.QUEUE]
    arrays = []
    for name in columns:
        if name == "id":
            arrays.append(ids_of(rows, None))
        elif name == "key_hash":
            arrays.append(pa.array(rows["key_hash"].view(np.int64)))
        else:
            column = rows[{"no": "message_no", "queued_us": "time_us"}.get(name, name)]
            arrays.append(pa.array(column).cast(QUEUE.field(name).type))
    return pa.table(arrays, schema=pa.schema([QUEUE.field(name) for name in columns]))


def messages_of(entries: NDArray[np.void]) -> pa.Table:
    """The table of messages from index entries alone, without the progress of groups."""
    return message_rows(entries, *(np.zeros(len(entries), np.int64) for _ in range(2)))[0]


def message_rows(
    table: NDArray[np.void], sources: NDArray[np.int64], digests: NDArray[np.int64]
) -> tuple[pa.Table, NDArray[np.int64]]:
    """A row for each message, with its half, outcome and place if the entries have them; and the row of each entry.

    For each entry, `sources` has the hash of its half's database and `digests` the hash of its contents; 0: not known.

    A message that is in several queues, or twice in one queue, has a row for each place, also if its half has none: the
    part of the log with its outcome may be unreadable. A rollback whose half is in
    another segment has one row, of message number 0 and without `half_us`.
    """
    chosen = np.flatnonzero(np.isin(table["kind"], _OF_MESSAGES))
    row_of = np.full(len(table), -1, np.int64)
    table, sources, digests = table[chosen], sources[chosen], digests[chosen]
    rank = _RANK[table["kind"]]
    order = np.lexsort((rank, table["message_no"], table["id_low"], table["id_high"]))
    table, sources, digests = table[order], sources[order], digests[order]
    new_id = np.ones(len(table), bool)
    new_id[1:] = (table["id_high"][1:] != table["id_high"][:-1]) | (table["id_low"][1:] != table["id_low"][:-1])
    new = new_id.copy()
    new[1:] |= table["message_no"][1:] != table["message_no"][:-1]
    kind = table["kind"]
    queued = kind == EntryKind.QUEUE
    # A second place of a message gets a row of its own. So does the dead letter, in another topic, of a half without a
    # place.
    has_topic = np.isin(kind[:-1], _WITH_TOPIC) & (table["topic"][1:] != table["topic"][:-1])
    new[1:] |= queued[1:] & (queued[:-1] | has_topic)
    row = np.cumsum(new) - 1
    row_of[chosen[order]] = row
    first = np.flatnonzero(new)
    hashes_of_rows = {"source": sources[first], "digest": digests[first]}
    return _message_table(table, hashes_of_rows, row, np.cumsum(new_id) - 1, first), row_of


def _message_table(
    table: NDArray[np.void],
    hashes_of_rows: Mapping[str, NDArray[np.int64]],
    row: NDArray[np.int64],
    transaction: NDArray[np.int64],
    first: NDArray[np.int64],
) -> pa.Table:
    """The table MESSAGES from sorted entries.

    `row` and `transaction` are the numbers of each entry's row and transaction. `first` is the first entry of each row.
    `hashes_of_rows` has a value for each row; 0: not known.
    """
    rows = len(first)
    kind = table["kind"]
    base = table[first]
    half = kind == EntryKind.HALF
    queued = kind == EntryKind.QUEUE
    delayed = kind == EntryKind.DELAYED
    withdrawn, withdraws = kind == EntryKind.WITHDRAWN, kind == EntryKind.WITHDRAWAL
    rolled = kind == EntryKind.ROLLBACK
    transactions = int(transaction[-1]) + 1 if len(transaction) else 0
    rolled_us, not_rolled = _spread(transactions, transaction[rolled], table["time_us"][rolled])

    def column(mask: NDArray[np.bool_], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return _spread(rows, row[mask], values[mask])

    half_us, no_half = column(half, table["time_us"])
    queued_us, no_queue = column(queued, table["time_us"])
    offset, _ = column(queued, table["offset"])
    due_us, not_due = column(delayed | withdrawn, due_times(table))
    committed_us, not_committed = column(delayed | queued | withdrawn | withdraws, table["time_us"])
    delayed_us, not_delayed = column(delayed, table["time_us"])
    marks = np.zeros(rows, np.int8)
    marks[row[withdrawn]] |= WITHDRAWN
    marks[row[withdraws]] |= TAKES_NO_PLACE
    committed_us = np.where(not_delayed, committed_us, delayed_us)
    has_rolled_back = ~not_rolled[transaction[first]] & not_committed
    decided_us = np.where(has_rolled_back, rolled_us[transaction[first]], committed_us)
    outcome = np.where(has_rolled_back, ROLLED_BACK, np.where(not_committed, 0, COMMITTED)).astype(np.int8)
    return pa.table(
        [
            ids_of(base, None),
            pa.array(base["message_no"].astype(np.int32)),
            pa.array(base["producer_group"].astype(np.int32)),
            pa.array(hashes_of_rows["source"], mask=hashes_of_rows["source"] == 0),
            pa.array(half_us, mask=no_half),
            pa.array(outcome),
            pa.array(decided_us, mask=outcome == 0),
            pa.array(due_us, mask=not_due),
            pa.array(queued_us, mask=no_queue),
            pa.array(base["topic"].astype(np.int64)),
            pa.array(base["queue"].astype(np.int32)),
            pa.array(offset, mask=no_queue),
            pa.array(base["key_hash"].view(np.int64)),
            pa.array(base["size"].astype(np.int32)),
            pa.array(base["position"].astype(np.int64)),
            pa.array(hashes_of_rows["digest"], mask=hashes_of_rows["digest"] == 0),
            *_hashes(base, hashes_of_rows["digest"]),
            *[pa.nulls(rows, pa.int64()) for _ in range(6)],
            pa.array(marks, mask=marks == 0),
        ],
        schema=MESSAGES,
    )


def _hashes(rows: NDArray[np.void], digests: NDArray[np.int64]) -> tuple[pa.Array, pa.Array]:
    """The columns `id_hash` and `body_hash`."""
    high, low, numbers = rows["id_high"], rows["id_low"], rows["message_no"].astype(np.int64)
    has_digest = digests != 0
    body_hashes = np.zeros(len(rows), np.int64)
    body_hashes[has_digest] = hashes.of_bodies(
        high[has_digest], low[has_digest], numbers[has_digest], digests[has_digest]
    )
    return pa.array(hashes.of_messages(high, low, numbers)), pa.array(body_hashes, mask=~has_digest)


def _spread(size: int, at: NDArray[np.int64], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A column of `size` rows with `values` at the rows `at`, and which of its rows have no value."""
    column = np.zeros(size, np.int64)
    is_missing = np.ones(size, bool)
    column[at] = values
    is_missing[at] = False
    return column, is_missing


_WITH_TOPIC = [int(k) for k in (EntryKind.HALF, EntryKind.DELAYED, EntryKind.WITHDRAWN, EntryKind.WITHDRAWAL)]
_OF_MESSAGES = [*_WITH_TOPIC, int(EntryKind.QUEUE), int(EntryKind.ROLLBACK)]
_RANK = np.zeros(256, np.uint8)
_RANK[[EntryKind.DELAYED, EntryKind.WITHDRAWN, EntryKind.WITHDRAWAL, EntryKind.ROLLBACK, EntryKind.QUEUE]] = range(1, 6)


def ids_of(rows: NDArray[np.void], missing: NDArray[np.bool_] | None) -> pa.Array:
    """Transaction ids as binary values of 16 bytes, made without a Python object for each id."""
    data = np.empty((len(rows), 2), ">u8")
    data[:, 0], data[:, 1] = rows["id_high"], rows["id_low"]
    ends = pa.py_buffer(np.arange(0, 16 * len(rows) + 1, 16, dtype=np.int32))
    valid = None
    if missing is not None:
        valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), len(rows), [valid, ends, pa.py_buffer(data)])
